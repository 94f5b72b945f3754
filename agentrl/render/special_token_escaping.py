"""Escaping of special tokens in content, so that text of documents never becomes a special token.

A retrieved page that contains ``<|im_end|>`` would otherwise end the turn. Special tokens in *content* are encoded as plain
characters; those that the chat template itself writes become tokens. The same holds for tokens that look special but are not
marked so in the tokenizer, such as DeepSeek's ``<｜User｜>``. Other added tokens, such as ``<search>``, are tokens
everywhere unless they are to be escaped too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agentrl.core.images import IMAGE_MARK

# One character of Unicode's private use area opens an escape, another closes it. The opening one is escaped in content
# too, so escaping is reversible.
_OPEN, _CLOSE = "\ue000", "\ue001"
_ESCAPE = re.compile(f"{_OPEN}(\\d+){_CLOSE}")

_SURROGATES = re.compile("[\ud800-\udfff]+")  # JSON can spell them, but tokenizers reject them
_LOOKS_SPECIAL = re.compile(r"<([|｜]).+\1>")


class EscapingEncoder:
    """Encodes content and rendered templates with one tokenizer; repeated strings come from a cache.

    Args:
        tokenizer: any Hugging Face tokenizer.
        added_tokens: escape the other added tokens too (``render.escape_added_tokens``).
        cache: number of cached strings.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, added_tokens: bool = False, cache: int = 8192) -> None:
        self._encode = _encoder(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content: at for at, token in added if token.special or _LOOKS_SPECIAL.fullmatch(token.content)}
        other_added = {token.content: at for at, token in added if token.content not in special}
        self.special_ids: Mapping[str, int] = special | other_added if added_tokens else special
        """Ids of all tokens that are escaped by their text: special ones, and those that look like one, come first."""
        self.unescaped: tuple[str, ...] = () if added_tokens else tuple(other_added)
        """Added tokens that are tokens in contents too."""
        self._escaped = (_OPEN, IMAGE_MARK, *self.special_ids)
        self._numbers = {text: number for number, text in enumerate(self._escaped)}
        self._in_content = _text_pattern(self._escaped)
        self._special_in_content = _text_pattern((_OPEN, IMAGE_MARK, *special))
        longest_first = sorted(self._escaped, key=len, reverse=True)
        specials = [re.escape(text) for text in longest_first if text not in (_OPEN, IMAGE_MARK)]
        # split_special_tokens does not affect added tokens that are not special, nor tokenizers that are Python code of
        # their model's folder: such tokens are split after their first character.
        unsplit = [text for text, index in self.special_ids.items() if index in self._split(text)]
        cuts = "|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in unsplit)
        self._cut = re.compile(cuts) if cuts else None
        self._in_template = re.compile(f"({'|'.join(specials)})") if specials else None
        self.content = lru_cache(maxsize=cache)(self._content)
        """``content(text)`` returns the ids of plain text, with special-token text as ordinary characters."""
        self.template = lru_cache(maxsize=cache)(self._template)
        """``template(text)`` returns the ids of a rendered template whose contents were escaped by `escape`."""

    def escape(self, text: str, *, special_only: bool = False) -> str:
        """Return content with special-token text escaped, so that it differs from the template's own special tokens.

        With ``special_only`` other added tokens are not escaped: they are meant in what an assistant says.
        """
        pattern = self._special_in_content if special_only else self._in_content
        return pattern.sub(lambda match: f"{_OPEN}{self._numbers[match[0]]}{_CLOSE}", text)

    def escape_json(self, value: Any) -> Any:
        """Return a JSON-able value with every string in it escaped."""
        return _map_strings(value, self.escape)

    def unescape(self, text: str) -> str:
        """Return the text that `escape` has escaped."""
        return _ESCAPE.sub(lambda match: self._escaped[int(match[1])], text)

    def _content(self, text: str) -> tuple[int, ...]:
        text = unicode_text(text)
        if self._in_content.search(text) is None:
            return tuple(self._encode(text, False))
        pieces = self._cut.split(text) if self._cut is not None else [text]
        return tuple(chain.from_iterable(map(self._split, pieces)))

    def _split(self, text: str) -> Sequence[int]:
        return self._encode(text, True)

    def _template(self, text: str) -> tuple[int, ...]:
        text = unicode_text(text)
        if _OPEN not in text:
            return tuple(self._encode(text, False))
        pieces = self._in_template.split(text) if self._in_template is not None else [text]
        ids: list[int] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                ids.append(self.special_ids[piece])
            elif piece:
                ids.extend(self._content(self.unescape(piece)))
        return tuple(ids)


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str, bool], list[int]]:
    """Return a function of a text, and of whether special tokens in it are split, that returns its ids.

    It is that of the backend without offsets if no class of the tokenizer has another: transformers takes 1.6 times as long.
    """
    kind = type(tokenizer)
    plain = kind.encode is PreTrainedTokenizerBase.encode and kind.__call__ is PreTrainedTokenizerBase.__call__
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and plain
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    ):
        backend, always_split = tokenizer.backend_tokenizer, bool(tokenizer.split_special_tokens)
        backend.no_truncation()
        backend.no_padding()

        def encode(text: str, split: bool) -> list[int]:
            backend.encode_special_tokens = split or always_split
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids

        return encode
    encode_whole = partial(tokenizer.encode, add_special_tokens=False)
    return lambda text, split: [*(encode_whole(text, split_special_tokens=True) if split else encode_whole(text))]


def _text_pattern(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def unicode_text(text: str) -> str:
    """Return text with surrogate pairs joined to characters, and lone surrogates replaced."""
    return _SURROGATES.sub(
        lambda match: match[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), text
    )


def unicode_json(value: Any) -> Any:
    """Return a JSON value with `unicode_text` for every string in it.

    Raises:
        RecursionError: it is nested too deeply.
    """
    return _map_strings(value, unicode_text)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value
