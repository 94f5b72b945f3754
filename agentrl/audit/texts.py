"""Checks with the tokenizer: whether ids decode to the saved texts, and how many turns retokenization would change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from agentrl.audit.report import EXAMPLES, DriftedTurn, Fault, Report
from agentrl.core.types import Provenance, Rollout

Turns = dict[str, tuple[int, ...]]
"""Sampled ids by request."""


class Texts:
    """Compares ids and texts with the tokenizer of the policy.

    Args:
        tokenizer: of the model that sampled.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def faults(self, rollout: Rollout, turns: Turns) -> Iterator[Fault]:
        """Yield saved texts that the ids do not decode to: the prompt, and the policy's messages."""
        if (
            rollout.prompt
            and rollout.rows
            and not any(self._begins(rollout, index) for index in range(len(rollout.rows)))
        ):
            yield Fault(f"no row begins with the prompt, {rollout.prompt[:60]!r}…")
        sampled_texts = Counter(self.decode(ids) for ids in turns.values())
        sampled_texts.update(self.decode(ids[:-1]) for ids in turns.values())  # without the token that ends a turn
        for number, turn in enumerate(rollout.turns):
            if turn.action and not sampled_texts[turn.action]:
                yield Fault(f"no request sampled the text of turn {number}, {turn.action[:60]!r}…")

    def measure(self, rollout: Rollout, turns: Turns, report: Report) -> None:
        """Count the turns whose text has other ids when it is retokenized."""
        for request, ids in turns.items():
            report.turns += 1
            retokenized = tuple(self._tokenizer.encode(self.decode(ids), add_special_tokens=False))
            if retokenized == ids:
                continue
            report.drifted += 1
            if len(report.examples) < EXAMPLES:
                pairs = zip(ids, retokenized, strict=False)
                first = next(
                    (index for index, (sampled_id, new_id) in enumerate(pairs) if sampled_id != new_id),
                    min(len(ids), len(retokenized)),
                )
                text = self.decode(ids[first:])
                report.examples.append(
                    DriftedTurn(rollout.rollout_id, request, first, text, ids[first:], retokenized[first:])
                )

    def decode(self, ids: tuple[int, ...]) -> str:
        """Return the text of ids, special tokens included."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _begins(self, rollout: Rollout, row_index: int) -> bool:
        row = rollout.rows[row_index]
        not_observed = row.provenance != Provenance.OBSERVED
        size = int(not_observed.argmax()) if not_observed.any() else len(not_observed)
        return self.decode(tuple(row.token_ids[:size].tolist())).startswith(rollout.prompt)


def sampled_turns(rollout: Rollout) -> Turns:
    """Return the sampled ids of each request; if a fork cuts them in one row, from the row that has all."""
    turns: Turns = {}
    for row in rollout.rows:
        starts = np.flatnonzero(np.diff(row.requests, prepend=-1, append=-1))
        for start, end in pairwise(starts):
            request = int(row.requests[start])
            if 0 <= request < len(row.request_ids):
                name = row.request_ids[request]
                if end - start > len(turns.get(name, ())):
                    turns[name] = tuple(row.token_ids[start:end].tolist())
    return turns
