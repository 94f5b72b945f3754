"""Stop strings: which tokens can complete one, and whether the sampled tokens contain one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase


class StopMatcher:
    """Finds stop strings in sampled tokens; text is decoded only after a token that could complete one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        """Create a matcher; ``vocabulary`` is the number of ids that the model can sample, possibly more than the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._texts: list[str] | None = None
        self.may_complete = lru_cache(maxsize=64)(self._may_complete)

    def texts(self) -> list[str]:
        """Return the text of each token decoded alone; computed at the first call."""
        if self._texts is None:
            token_count = min(self._vocabulary, len(self._tokenizer))
            decoded = self._tokenizer.batch_decode([[token] for token in range(token_count)], skip_special_tokens=False)
            self._texts = decoded + [""] * (self._vocabulary - token_count)
        return self._texts

    def _may_complete(self, stops: tuple[str, ...]) -> NDArray[np.bool_]:
        """Return ``[vocabulary]``: whether a token can complete one of ``stops``."""
        if not all(stop.isascii() for stop in stops):
            # A character may consist of several tokens, none of which decodes to text alone.
            return np.ones(self._vocabulary, np.bool_)
        ends = {stop[at:] for stop in stops for at in range(len(stop))}
        # Decoded alone, a token may lose its leading space: `_can_complete` tries both.
        return np.array([any(_can_complete(text, stop, ends) for stop in stops) for text in self.texts()], np.bool_)

    def find(self, output: Sequence[int], stops: tuple[str, ...]) -> str | None:
        """Return the stop string that the last token of ``output`` completes, or None."""
        longest = max(len(stop.encode()) for stop in stops)
        tail = self.decode(output[-(longest + 1) :], skip_special=False)
        return next((stop for stop in stops if stop in tail), None)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the decoded text of token ids."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def text(self, output: Sequence[int], stop: str | None, *, skip_special: bool) -> str:
        """Return the text of an output, cut before the first ``stop`` if one is given."""
        text = self.decode(output, skip_special=skip_special)
        return text if stop is None else text.partition(stop)[0]


def _can_complete(text: str, stop: str, ends: set[str]) -> bool:
    # A token completes a stop string if it starts with a suffix of it, or contains all of it.
    return bool(text) and (stop in text or any((" " + text).startswith(end) or text.startswith(end) for end in ends))
