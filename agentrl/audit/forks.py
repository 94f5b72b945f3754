"""Checks across the rows of a rollout: they must be the leaves of one token graph.

The graph is rebuilt from the rows: two rows share their common prefix, with equal ids, provenance and requests. It
determines which rows exist and which row trains each sampled token; both must be as saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.audit.report import Fault
from agentrl.core.types import MaskReason, Provenance, Rollout, Row

Key = NDArray[np.int64]
"""``[T, 3]`` id, provenance and request of each token of a row; requests numbered over the rollout."""


def graph_faults(rollout: Rollout) -> Iterator[Fault]:
    """Yield violations across rows that are valid themselves."""
    agents: dict[str, list[Row]] = {}
    for row in rollout.rows:
        agents.setdefault(row.key.agent_id, []).append(row)
    temperatures = {row.temperature for row in rollout.rows}
    if len(temperatures) > 1:
        yield Fault(f"its rows were sampled at several temperatures: {', '.join(map(str, sorted(temperatures)))}")
    yield from _agent_faults(rollout.rows)
    sampled = 0
    for rows in agents.values():
        graph = _Graph(rows)
        sampled += graph.sampled
        yield from _row_faults(rows)
        yield from graph.faults()
    if sampled != rollout.sampled_tokens:
        yield Fault(f"sampled_tokens is {rollout.sampled_tokens}; its rows have {sampled} sampled tokens")


def _agent_faults(rows: Sequence[Row]) -> Iterator[Fault]:
    """Yield requests that sampled for several agents."""
    agents: dict[str, str] = {}
    for row in rows:
        for name in row.request_ids:
            if (other := agents.setdefault(name, row.key.agent_id)) != row.key.agent_id:
                yield Fault(f"request {name!r} sampled for agent {other!r} too", row.key.row)


def _row_faults(rows: Sequence[Row]) -> Iterator[Fault]:
    """Yield violations of row numbers and forks: every row but the first has a fork reason."""
    for place, row in enumerate(rows):
        if row.key.row != place:
            yield Fault(f"it stands in place {place}", row.key.row)
        if place and row.fork is None:
            yield Fault("it forks, and has no fork reason", row.key.row)
        if not place and row.fork is not None:
            yield Fault(f"it is the first row of the trajectory, and has a fork reason: {row.fork.value}", row.key.row)


class _Graph:
    """Token graph of one agent's rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        numbers: dict[str, int] = {}
        self.rows = rows
        self.keys = [_key(row, numbers) for row in rows]
        self.shared: list[tuple[int, int]] = [(0, -1)]
        """For each row, the length of its longest common prefix with an earlier row, and the index of that row."""
        for later in range(1, len(rows)):
            common = [_common(self.keys[earlier], self.keys[later]) for earlier in range(later)]
            most = int(np.argmax(common))
            self.shared.append((common[most], most))

    @property
    def sampled(self) -> int:
        """Sampled tokens, shared ones once."""
        pairs = zip(self.rows, self.shared, strict=True)
        return sum(int((row.provenance[size:] == Provenance.SAMPLED).sum()) for row, (size, _) in pairs)

    def faults(self) -> Iterator[Fault]:
        """Yield differences from the graph."""
        seen: dict[str, tuple[int, int, int]] = {}
        for place, (row, (size, other)) in enumerate(zip(self.rows, self.shared, strict=True)):
            yield from self._leaf_faults(place)
            yield from _shared_faults(row, size)
            if size:
                yield from _value_faults(row, self.rows[other], size)
            yield from self._request_faults(place, seen)

    def _leaf_faults(self, place: int) -> Iterator[Fault]:
        size, other = self.shared[place]
        row, before = self.rows[place], self.rows[other]
        if other >= 0 and size == len(row.token_ids):
            yield Fault(f"all of it is in row {before.key.row}, so it is not a separate row", row.key.row)
        elif other >= 0 and size == len(before.token_ids):
            yield Fault(f"row {before.key.row} is the beginning of it, so it does not fork there", row.key.row)

    def _request_faults(self, place: int, seen: dict[str, tuple[int, int, int]]) -> Iterator[Fault]:
        """Yield requests whose tokens, or the tokens before them, differ from an earlier row with the same request."""
        row = self.rows[place]
        for number, name in enumerate(row.request_ids):
            (tokens,) = np.nonzero(row.requests == number)
            if not len(tokens):
                continue
            start, end = int(tokens[0]), int(tokens[-1]) + 1
            if name not in seen:
                seen[name] = (place, start, end)
                continue
            other, its_start, its_end = seen[name]
            before = self.rows[other].key.row
            common = _common(self.keys[other], self.keys[place])
            if start != its_start or common < start:
                yield Fault(
                    f"request {name!r} follows other tokens than in row {before}", row.key.row, min(start, common)
                )
            elif common < min(end, its_end):
                token = int(row.token_ids[common])
                words = f"request {name!r} sampled id {token}, and in row {before} {self.rows[other].token_ids[common]}"
                yield Fault(words, row.key.row, common)
            elif end > its_end:
                seen[name] = (place, start, end)


def _shared_faults(row: Row, size: int) -> Iterator[Fault]:
    """Yield sampled tokens that are trained in several rows, or in none: only the first row with a token trains it."""
    sampled = row.provenance == Provenance.SAMPLED
    marked = row.mask_reason == MaskReason.SHARED
    before = np.arange(len(sampled)) < size
    for words, where in {
        "an earlier row has it too, and it is not marked as shared": sampled & before & ~marked,
        "it is marked as shared, and no earlier row has it": sampled & ~before & marked,
    }.items():
        if where.any():
            token = int(where.argmax())
            yield Fault(f"{words} (id {row.token_ids[token]}, mask {row.mask[token]})", row.key.row, token)


def _value_faults(row: Row, other: Row, size: int) -> Iterator[Fault]:
    for name, words in (("logprobs", "log-probability"), ("versions", "policy version")):
        mine, theirs = getattr(row, name)[:size], getattr(other, name)[:size]
        different = ~((mine == theirs) | ((mine != mine) & (theirs != theirs)))
        if different.any():
            token = int(different.argmax())
            yield Fault(f"its {words} is {mine[token]}, and in row {other.key.row} {theirs[token]}", row.key.row, token)


def _key(row: Row, numbers: dict[str, int]) -> Key:
    named = [numbers.setdefault(name, len(numbers)) for name in row.request_ids]
    of_rollout = np.array([*named, -1], np.int64)
    inside = (row.requests >= 0) & (row.requests < len(named))
    requests = of_rollout[np.where(inside, row.requests, -1)]
    return np.stack((row.token_ids.astype(np.int64), row.provenance.astype(np.int64), requests), axis=1)


def _common(left: Key, right: Key) -> int:
    """Return the length of the common prefix of two rows."""
    size = min(len(left), len(right))
    different = (left[:size] != right[:size]).any(axis=1)
    return int(different.argmax()) if different.any() else size
