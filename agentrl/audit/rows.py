"""Checks of the rows of a rollout: masks, mask reasons and provenance of each, and that they are leaves of one token graph.

The graph is rebuilt from the rows: two rows share their common prefix, with equal ids, provenance and requests. It
determines which rows exist and which row trains each sampled token; both must be as saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.audit.report import Fault
from agentrl.core.types import MaskReason, Provenance, Rollout, Row
from agentrl.obs.rollout_format import ARRAYS

Where = NDArray[np.bool_]


def row_faults(row: Row) -> Iterator[Fault]:
    """Yield the faults of a row, each kind once, at the first token that has it."""
    number = row.key.row
    sizes = {name: len(getattr(row, name)) for name in ARRAYS}
    if len(set(sizes.values())) > 1 or any(getattr(row, name).ndim != 1 for name in ARRAYS):
        yield Fault(f"its arrays are not of one length: {sizes}", number)
        return
    if not sizes["token_ids"]:
        yield Fault("it has no tokens", number)
        return
    if row.support is not None and len(row.support) != sizes["token_ids"]:
        yield Fault(f"it has {sizes['token_ids']} tokens, and the sampling support of {len(row.support)}", number)
        return
    for words, faulty_T in {**_mask_faults(row), **_provenance_faults(row), **_support_faults(row)}.items():
        if faulty_T.any():
            token = int(faulty_T.argmax())
            yield Fault(f"{words} ({_values(row, token)})", number, token)
    yield from _request_faults(row)
    if not (math.isfinite(row.temperature) and row.temperature >= 0):
        yield Fault(f"its temperature is {row.temperature}", number)


def _mask_faults(row: Row) -> Mapping[str, Where]:
    sampled = row.provenance == Provenance.SAMPLED
    unmasked = row.mask_reason == MaskReason.NONE
    return {
        "the mask is neither 0 nor 1": row.mask > 1,
        "its provenance is unknown": row.provenance > max(Provenance),
        "the reason for its mask is unknown": row.mask_reason > max(MaskReason),
        "it has mask 1, and no engine sampled it": (row.mask == 1) & ~sampled,
        "its mask and the reason for it disagree": (row.mask == 1) != unmasked,
        "it was sampled, and its mask is 0 as if it were not": sampled & (row.mask_reason == MaskReason.OBSERVED),
        "it was not sampled, and its mask has a reason for samples": ~sampled
        & ~unmasked
        & (row.mask_reason != MaskReason.OBSERVED),
    }


def _provenance_faults(row: Row) -> Mapping[str, Where]:
    sampled = row.provenance == Provenance.SAMPLED
    has_sample_values = (row.logprobs != 0) | (row.versions != -1) | (row.requests != -1)
    return {
        "its id is below 0": row.token_ids < 0,
        "its log-probability is no finite number of at most 0": sampled
        & ~(np.isfinite(row.logprobs) & (row.logprobs <= 0)),
        "it was sampled by no policy version": sampled & (row.versions < 0),
        "it was sampled by no known request": sampled & ((row.requests < 0) | (row.requests >= len(row.request_ids))),
        "no engine sampled it, and it has what only samples have": ~sampled & has_sample_values,
    }


def _support_faults(row: Row) -> Mapping[str, Where]:
    if row.support is None:
        return {}
    is_known = row.support.counts > 0
    return {
        "it is none of the ids that it was sampled from": is_known & ~row.support.contains(row.token_ids),
        "no engine sampled it, and it has a sampling support": is_known & (row.provenance != Provenance.SAMPLED),
    }


def _request_faults(row: Row) -> Iterator[Fault]:
    """Yield faults of requests: each samples one contiguous range of tokens, in the order of the list."""
    number, names = row.key.row, row.request_ids
    if len(set(names)) < len(names) or not all(names):
        yield Fault(f"its request ids are not unique names: {', '.join(map(repr, names))}", number)
    if len(set(row.turns)) < len(names) or len(row.turns) > len(names):
        yield Fault(f"its turns {row.turns} are not one for each of its {len(names)} requests", number)
    starts = np.flatnonzero(np.diff(row.requests, prepend=-1))
    segments = [(int(token), int(row.requests[token])) for token in starts if row.requests[token] >= 0]
    for position, (token, request) in enumerate(segments):
        if request < len(names) and request != position:
            yield Fault(
                f"request {names[request]!r} does not sample one stretch of tokens, in its order", number, token
            )
            return
    if len(segments) < len(names):
        yield Fault(f"request {names[len(segments)]!r} has sampled none of its tokens", number)
    older = (np.diff(row.versions) < 0) & (np.diff(row.requests) == 0) & (row.requests[1:] >= 0)
    if older.any():
        token = int(older.argmax()) + 1
        words = (
            f"its policy version {row.versions[token]} is older than {row.versions[token - 1]} before it in its request"
        )
        yield Fault(words, number, token)


def _values(row: Row, token: int) -> str:
    return (
        f"id {row.token_ids[token]}, provenance {row.provenance[token]}, mask {row.mask[token]}, "
        f"reason {row.mask_reason[token]}, log-probability {row.logprobs[token]:g}, version {row.versions[token]}, "
        f"request {row.requests[token]}"
    )


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
    for row in rollout.rows:
        if rollout.turns and not rollout.dropped and max(row.turns, default=0) >= len(rollout.turns):
            yield Fault(f"it has turn {max(row.turns)}; the rollout has {len(rollout.turns)}", row.key.row)
    sampled = 0
    for rows in agents.values():
        graph = _Graph(rows)
        sampled += graph.sampled
        yield from _row_faults(rows)
        yield from graph.faults()
    if sampled != rollout.sampled_tokens:
        yield Fault(f"sampled_tokens is {rollout.sampled_tokens}; its rows have {sampled} sampled tokens")


def _agent_faults(rows: Sequence[Row]) -> Iterator[Fault]:
    agents: dict[str, str] = {}
    for row in rows:
        for name in row.request_ids:
            if (first_agent := agents.setdefault(name, row.key.agent_id)) != row.key.agent_id:
                yield Fault(f"request {name!r} sampled for agent {first_agent!r} too", row.key.row)


def _row_faults(rows: Sequence[Row]) -> Iterator[Fault]:
    """Yield violations of row numbers and forks: every row but the first has a fork reason."""
    for position, row in enumerate(rows):
        if row.key.row != position:
            yield Fault(f"it stands in place {position}", row.key.row)
        if position and row.fork is None:
            yield Fault("it forks, and has no fork reason", row.key.row)
        if not position and row.fork is not None:
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
        for index, (row, (size, earlier)) in enumerate(zip(self.rows, self.shared, strict=True)):
            yield from self._leaf_faults(index)
            yield from _shared_faults(row, size)
            if size:
                yield from _value_faults(row, self.rows[earlier], size)
            yield from self._request_faults(index, seen)

    def _leaf_faults(self, index: int) -> Iterator[Fault]:
        size, earlier_index = self.shared[index]
        row, earlier = self.rows[index], self.rows[earlier_index]
        if earlier_index >= 0 and size == len(row.token_ids):
            yield Fault(f"all of it is in row {earlier.key.row}, so it is not a separate row", row.key.row)
        elif earlier_index >= 0 and size == len(earlier.token_ids):
            yield Fault(f"row {earlier.key.row} is the beginning of it, so it does not fork there", row.key.row)

    def _request_faults(self, index: int, seen: dict[str, tuple[int, int, int]]) -> Iterator[Fault]:
        """Yield requests whose tokens, or the tokens before them, differ from an earlier row with the same request."""
        row = self.rows[index]
        for number, name in enumerate(row.request_ids):
            (tokens,) = np.nonzero(row.requests == number)
            if not len(tokens):
                continue
            start, end = int(tokens[0]), int(tokens[-1]) + 1
            if name not in seen:
                seen[name] = (index, start, end)
                continue
            earlier_index, earlier_start, earlier_end = seen[name]
            earlier_number = self.rows[earlier_index].key.row
            common = _common(self.keys[earlier_index], self.keys[index])
            if start != earlier_start or common < start:
                yield Fault(
                    f"request {name!r} follows other tokens than in row {earlier_number}",
                    row.key.row,
                    min(start, common),
                )
            elif common < min(end, earlier_end):
                token = int(row.token_ids[common])
                earlier_token = self.rows[earlier_index].token_ids[common]
                words = f"request {name!r} sampled id {token}, and in row {earlier_number} {earlier_token}"
                yield Fault(words, row.key.row, common)
            elif end > earlier_end:
                seen[name] = (index, start, end)


def _shared_faults(row: Row, size: int) -> Iterator[Fault]:
    """Yield sampled tokens that are trained in several rows, or in none: only the first row with a token trains it."""
    sampled = row.provenance == Provenance.SAMPLED
    marked = row.mask_reason == MaskReason.SHARED
    in_prefix = np.arange(len(sampled)) < size
    for words, faulty_T in {
        "an earlier row has it too, and it is not marked as shared": sampled & in_prefix & ~marked,
        "it is marked as shared, and no earlier row has it": sampled & ~in_prefix & marked,
    }.items():
        if faulty_T.any():
            token = int(faulty_T.argmax())
            yield Fault(f"{words} (id {row.token_ids[token]}, mask {row.mask[token]})", row.key.row, token)


def _value_faults(row: Row, earlier: Row, size: int) -> Iterator[Fault]:
    for name, words in (("logprobs", "log-probability"), ("versions", "policy version")):
        values, earlier_values = getattr(row, name)[:size], getattr(earlier, name)[:size]
        different = ~((values == earlier_values) | ((values != values) & (earlier_values != earlier_values)))
        if different.any():
            token = int(different.argmax())
            yield Fault(
                f"its {words} is {values[token]}, and in row {earlier.key.row} {earlier_values[token]}",
                row.key.row,
                token,
            )


def _key(row: Row, numbers: dict[str, int]) -> Key:
    rollout_numbers = [numbers.setdefault(name, len(numbers)) for name in row.request_ids]
    number_by_request = np.array([*rollout_numbers, -1], np.int64)
    has_request = (row.requests >= 0) & (row.requests < len(rollout_numbers))
    requests = number_by_request[np.where(has_request, row.requests, -1)]
    return np.stack((row.token_ids.astype(np.int64), row.provenance.astype(np.int64), requests), axis=1)


def _common(first: Key, second: Key) -> int:
    """Return the length of the common prefix of two rows."""
    size = min(len(first), len(second))
    different = (first[:size] != second[:size]).any(axis=1)
    return int(different.argmax()) if different.any() else size
