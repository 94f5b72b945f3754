"""Sequences of sampled tokens: what one agent sampled in a rollout, over all of its rows. Legend: ``S`` tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import Rollout, Row, RowKey

SequenceKey = tuple[str, str]
"""``rollout_id`` and ``agent_id``."""
RowValues = Mapping[RowKey, NDArray[np.float32]]
"""By row: ``[T]``, a value of each token; values at unmasked tokens are ignored."""


def sequence_key(key: RowKey) -> SequenceKey:
    """Return the key of the sequence that a row belongs to."""
    return key.rollout_id, key.agent_id


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """The trained tokens of one agent in one rollout, in the order of its rows.

    A conversation's rows are in the order in which they were begun, and a token that several share is trained in the
    first: so this is the order sampled, but for branches (subagents), which follow the conversation that they left.
    """

    rows: tuple[Row, ...]
    """Ordered by ``RowKey.row``."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(int(_trained_mask(row).sum()) for row in self.rows)

    @property
    def turns_S(self) -> NDArray[np.int64]:
        """Index of each token's turn: how many requests of the sequence were before its own, masked ones included."""
        numbers: dict[str, int] = {}
        turns: list[int] = []
        for row in self.rows:
            sampled = row.requests >= 0
            for request, trained in zip(
                row.requests[sampled].tolist(), _trained_mask(row)[sampled].tolist(), strict=True
            ):
                turn = numbers.setdefault(row.request_ids[request], len(numbers))
                if trained:
                    turns.append(turn)
        return np.array(turns, np.int64)

    def gather(self, values: RowValues) -> NDArray[np.float64]:
        """Return ``[S]`` values of the sequence's tokens; rows without values have zeros."""
        values_by_row = [
            np.asarray(values[row.key] if row.key in values else np.zeros(len(row.mask)), np.float64)[
                _trained_mask(row)
            ]
            for row in self.rows
        ]
        return np.concatenate(values_by_row) if values_by_row else np.zeros(0)

    def scatter(self, values_S: NDArray[np.float64]) -> dict[RowKey, NDArray[np.float32]]:
        """Return ``[S]`` values as ``[T]`` values of each row, 0 at tokens that are not trained."""
        values_by_row, start = {}, 0
        for row in self.rows:
            trained = _trained_mask(row)
            values_T = np.zeros(len(trained), np.float32)
            values_T[trained] = values_S[start : start + int(trained.sum())]
            start += int(trained.sum())
            values_by_row[row.key] = values_T
        return values_by_row


def _trained_mask(row: Row) -> NDArray[np.bool_]:
    """Return where a row is trained; never its first token, which nothing predicts."""
    trained = row.mask.astype(bool)
    trained[:1] = False
    return trained


def sampled_sequences(rollout: Rollout) -> list[SampledSequence]:
    """Return the sequences of a rollout, one an agent."""
    return group_sequences(rollout.rows)


def group_sequences(rows: Iterable[Row]) -> list[SampledSequence]:
    """Return the sequences of any rows, in the order in which they first occur."""
    rows_by_sequence: dict[SequenceKey, list[Row]] = {}
    for row in rows:
        rows_by_sequence.setdefault(sequence_key(row.key), []).append(row)
    return [
        SampledSequence(tuple(sorted(sequence_rows, key=lambda row: row.key.row)))
        for sequence_rows in rows_by_sequence.values()
    ]
