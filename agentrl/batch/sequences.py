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
    """The trained tokens of one agent in one rollout, in the order sampled.

    Branches (subagents) follow the conversation that they left. A row that a conversation returned to holds tokens that
    were sampled after those of a later row.
    """

    rows: tuple[Row, ...]
    """Ordered by ``RowKey.row``."""

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(int(_trained_mask(row).sum()) for row in self.rows)

    @property
    def turns_S(self) -> NDArray[np.int64]:
        """Index of each token's turn in ``Rollout.turns``; not decreasing."""
        return np.sort(self._turns_in_rows())

    def _turns_in_rows(self) -> NDArray[np.int64]:
        """Return the turn of each token in the order of the rows."""
        numbers: dict[str, int] = {}
        turns = [np.zeros(0, np.int64)]
        for row in self.rows:
            for number, request in enumerate(row.request_ids):
                numbers.setdefault(request, row.turns[number] if row.turns else len(numbers))
            by_request = np.array([*(numbers[request] for request in row.request_ids), 0], np.int64)
            turns.append(by_request[row.requests[_trained_mask(row)]])
        return np.concatenate(turns)

    @property
    def _order_S(self) -> NDArray[np.int64]:
        """Place of each token in the order of the rows."""
        return np.argsort(self._turns_in_rows(), kind="stable")

    def gather(self, values: RowValues) -> NDArray[np.float64]:
        """Return ``[S]`` values of the sequence's tokens; rows without values have zeros."""
        values_by_row = [
            np.asarray(values[row.key] if row.key in values else np.zeros(len(row.mask)), np.float64)[
                _trained_mask(row)
            ]
            for row in self.rows
        ]
        return np.concatenate([np.zeros(0), *values_by_row])[self._order_S]

    def scatter(self, values_S: NDArray[np.float64]) -> dict[RowKey, NDArray[np.float32]]:
        """Return ``[S]`` values as ``[T]`` values of each row, 0 at tokens that are not trained."""
        in_rows_S = np.empty(len(values_S), np.float64)
        in_rows_S[self._order_S] = values_S
        values_by_row, start = {}, 0
        for row in self.rows:
            trained = _trained_mask(row)
            values_T = np.zeros(len(trained), np.float32)
            values_T[trained] = in_rows_S[start : start + int(trained.sum())]
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
