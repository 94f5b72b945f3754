"""The segments of a turn: what one request of it returned, and the joining of two that a pause separated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import SamplerError
from agentrl.core.experts import Experts
from agentrl.core.types import FinishReason, Generation
from agentrl.models.routing import Routing


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a client must know of the policy's tokens."""

    size: int
    """Ids that the model can sample: 0 to ``size - 1``."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids, special tokens included."""
    routing: Routing | None = None
    """Sizes of the experts that engines return; None: they return none."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one or more requests of a turn."""

    generation: Generation
    exact: bool
    """Whether the versions are the engine's own, token by token, and not one for the whole reply."""


def join(left: Segment, right: Segment, stops: Sequence[str], vocabulary: Vocabulary | None = None) -> Segment:
    """Return two consecutive segments of a turn as one; a stop string across the border ends the turn there.

    Engines look for stop strings only in the tokens of one request, so they miss such a string. Tokens after the one
    that completes it are dropped, as if they had not been sampled.

    Raises:
        SamplerError: there are stop strings, and without a ``vocabulary`` they cannot be found.
    """
    before, after = left.generation, right.generation
    count, finish = len(after.token_ids), after.finish_reason
    completed = _completed_stop(before.token_ids, after.token_ids, stops, vocabulary) if stops else None
    if completed is not None:
        count, finish = completed, FinishReason.STOP
    versions = list(before.versions)
    for start, version in after.versions:
        if start < count and (not versions or versions[-1][1] != version):
            versions.append((len(before.token_ids) + start, version))
    generation = replace(
        before,
        token_ids=before.token_ids + after.token_ids[:count],
        logprobs=before.logprobs + after.logprobs[:count],
        finish_reason=finish,
        versions=tuple(versions),
        experts=_joined_experts(before, after, count),
        experts_from=after.experts_from if before.experts is None else before.experts_from,
    )
    return Segment(generation, left.exact and right.exact)


def _joined_experts(before: Generation, after: Generation, count: int) -> Experts | None:
    """Return the experts of both, without those of tokens that were dropped. The second continues where the first ends."""
    parts: list[NDArray[Any]] = [part.experts for part in (before, after) if part.experts is not None]
    if not parts:
        return None
    dropped = len(after.token_ids) - count if after.experts is not None else 0
    experts: NDArray[Any] = np.concatenate(parts)
    return experts[: len(experts) - dropped]


def _completed_stop(
    left: Sequence[int], right: Sequence[int], stops: Sequence[str], vocabulary: Vocabulary | None
) -> int | None:
    """Return how many tokens of ``right`` complete the first stop string that begins in ``left``, or None.

    Ids are decoded together, because the border may lie inside of a character.
    """
    if vocabulary is None:
        raise SamplerError("a pause cut a turn with stop strings, and the client has no vocabulary to find them with")
    longest = max(len(stop.encode()) for stop in stops)  # at least a byte a token
    for count in range(1, min(longest, len(right)) + 1):
        text = vocabulary.decode([*left[-longest:], *right[:count]])
        if any(stop in text for stop in stops):
            return count
    return None
