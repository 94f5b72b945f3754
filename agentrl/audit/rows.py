"""Checks of a single row: masks, mask reasons and provenance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from agentrl.audit.report import Fault
from agentrl.core.types import MaskReason, Provenance, Row
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
    for words, faulty_T in {**_mask_faults(row), **_provenance_faults(row)}.items():
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
