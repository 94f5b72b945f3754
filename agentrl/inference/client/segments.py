"""The segments of a turn: what one request returned, with experts and sampling support, and the joining of two that a pause
separated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import SamplerError
from agentrl.core.experts import Experts
from agentrl.core.sampling_support import SamplingSupport, concatenate_supports
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.models.routing import KEY, Routing


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a client must know of the policy's tokens."""

    size: int
    """Ids that the model can sample: 0 to ``size - 1``."""
    decode: Callable[[Sequence[int]], str]
    """Returns the text of ids, special tokens included."""
    routing: Routing | None = None
    """Sizes of the experts that engines return; None: they return none."""
    image_token_id: int | None = None
    """The token that stands for each of an image's features; None: the policy takes no images."""
    image_prompt: Prompt | None = None
    """A prompt with images, whose tokens are compared with the engine's when it starts; None: none is."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one or more requests of a turn."""

    generation: Generation
    exact: bool
    """Whether the versions are the engine's own, token by token, and not one for the whole reply."""


def join(first: Segment, second: Segment, stops: Sequence[str], vocabulary: Vocabulary | None = None) -> Segment:
    """Return two consecutive segments of a turn as one; a stop string across the border ends the turn there.

    Engines look for stop strings only in the tokens of one request, so they miss such a string. Tokens after the one
    that completes it are dropped, as if they had not been sampled.

    Raises:
        SamplerError: there are stop strings, and without a ``vocabulary`` they cannot be found.
    """
    start, end = first.generation, second.generation
    count, finish = len(end.token_ids), end.finish_reason
    completed = _find_completed_stop(start.token_ids, end.token_ids, stops, vocabulary) if stops else None
    if completed is not None:
        count, finish = completed, FinishReason.STOP
    versions = list(start.versions)
    for offset, version in end.versions:
        if offset < count and (not versions or versions[-1][1] != version):
            versions.append((len(start.token_ids) + offset, version))
    generation = replace(
        start,
        token_ids=start.token_ids + end.token_ids[:count],
        logprobs=start.logprobs + end.logprobs[:count],
        finish_reason=finish,
        versions=tuple(versions),
        verified=start.verified + end.verified,
        experts=_join_experts(start, end, count),
        experts_from=end.experts_from if start.experts is None else start.experts_from,
        support=concatenate_supports(
            [start.support, None if end.support is None else end.support.slice(0, count)],
            [len(start.token_ids), count],
        ),
    )
    return Segment(generation, first.exact and second.exact)


def _join_experts(start: Generation, end: Generation, count: int) -> Experts | None:
    """Return the experts of both, without those of tokens that were dropped. The second continues where the first ends."""
    arrays: list[NDArray[Any]] = [generation.experts for generation in (start, end) if generation.experts is not None]
    if not arrays:
        return None
    dropped = len(end.token_ids) - count if end.experts is not None else 0
    experts: NDArray[Any] = np.concatenate(arrays)
    return experts[: len(experts) - dropped]


def _find_completed_stop(
    first_ids: Sequence[int], second_ids: Sequence[int], stops: Sequence[str], vocabulary: Vocabulary | None
) -> int | None:
    """Return how many tokens of ``second_ids`` complete the first stop string that begins in ``first_ids``, or None.

    Ids are decoded together, because the border may lie inside of a character.
    """
    if vocabulary is None:
        raise SamplerError("a pause cut a turn with stop strings, and the client has no vocabulary to find them with")
    longest = max(len(stop.encode()) for stop in stops)  # at least a byte a token
    for count in range(1, min(longest, len(second_ids)) + 1):
        text = vocabulary.decode([*first_ids[-longest:], *second_ids[:count]])
        if any(stop in text for stop in stops):
            return count
    return None


_START = "routed_experts_start_len"


def experts_options(params: SamplingParams, sampled: Segment | None) -> dict[str, Any]:
    """Return the options of a request for experts: of the tokens whose experts no earlier segment of the turn has."""
    if params.experts_from is None:
        return {}
    received = 0 if sampled is None or sampled.generation.experts is None else len(sampled.generation.experts)
    return {"return_routed_experts": True, _START: params.experts_from + received}


def read_experts(
    text: str | None, tokens: int, body: Mapping[str, Any], vocabulary: Vocabulary | None, *, aborted: bool
) -> Experts | None:
    """Return the experts ``[n, layers, K]`` in a reply; None if none were requested, or an aborted request has none.

    Args:
        text: ``routed_experts`` of the reply.
        tokens: of prompt and output.
        body: the request.
        vocabulary: of the policy.
        aborted: whether the request was.

    Raises:
        SamplerError: they are missing, or not those of these tokens.
    """
    start = body.get(_START)
    if start is None or (text is None and aborted):
        return None
    routing = None if vocabulary is None else vocabulary.routing
    assert routing is not None, "a client that requests experts has their sizes"
    if text is None:
        raise SamplerError(
            f"the engine's reply to {body['rid']} has no routed_experts; start the engine with --enable-return-routed-experts, "
            f"or set {KEY}=false"
        )
    try:
        return routing.read(text, max(tokens - 1 - start, 0))
    except ValueError as error:
        raise SamplerError(f"the engine's reply to {body['rid']} has routed_experts that {error}") from error


_MODES = {"ids": "selected", "logprobs": "support"}
"""SGLang's ``sampling_logprobs_mode``, by `SamplingParams.support`."""
SUPPORT_KEY = "sampler.renormalise"


def support_options(params: SamplingParams) -> dict[str, bool | str]:
    """Return the options of a request for the sampling support of its tokens."""
    if params.support is None:
        return {}
    return {"return_sampling_mask": True, "sampling_logprobs_mode": _MODES[params.support]}


@dataclass(frozen=True, slots=True)
class SampledSupport:
    """The sampling support of a reply."""

    support: SamplingSupport
    logprobs: tuple[float, ...]
    """Log-probabilities of the sampled ids among those of their support."""


def read_support(
    masks: Sequence[Sequence[int]] | None,
    logprobs: Sequence[float | Sequence[float]] | None,
    ids: Sequence[int],
    rid: str,
    mode: str | None,
    vocabulary: Vocabulary | None,
) -> SampledSupport | None:
    """Return the sampling support in a reply; None if none was requested.

    Args:
        masks: ``output_token_sampling_mask`` of the reply: the ids that each token was sampled from.
        logprobs: ``output_token_sampling_logprobs``: those of these ids, or of the sampled tokens.
        ids: the sampled tokens.
        rid: of the request.
        mode: its ``sampling_logprobs_mode``; None: no support was requested.
        vocabulary: of the policy.

    Raises:
        SamplerError: it is missing, or impossible.
    """
    if mode is None:
        return None
    if (masks is None or logprobs is None) and not ids:
        masks = logprobs = ()
    if masks is None or logprobs is None:
        raise SamplerError(
            f"the engine's reply to {rid} has no output_token_sampling_mask, which SGLang returns since 0.5.23; upgrade "
            f"the engine, or set {SUPPORT_KEY}=learner"
        )
    if len(masks) != len(ids) or len(logprobs) != len(ids):
        fault = f"{len(ids)} tokens, {len(masks)} sampling masks and {len(logprobs)} sampling log-probabilities"
        raise SamplerError(f"the engine's reply to {rid} has {fault}")
    counts = np.fromiter(map(len, masks), np.int32, len(masks))
    kept_ids = np.fromiter(chain.from_iterable(masks), np.int64, int(counts.sum()))
    id_count = np.iinfo(np.int32).max if vocabulary is None else vocabulary.size
    if len(kept_ids) and not 0 <= kept_ids.min() <= kept_ids.max() < id_count:
        raise SamplerError(f"the engine's reply to {rid} has a sampling mask with ids outside of 0 to {id_count - 1}")
    sampled_ids = np.asarray(ids, np.int64)
    support = SamplingSupport(counts, kept_ids.astype(np.int32))
    if not support.contains(sampled_ids).all() or support.has_repeated_ids:
        raise SamplerError(
            f"the engine's reply to {rid} has a sampling mask without the sampled token, or with an id twice"
        )
    if mode == _MODES["logprobs"]:
        columns = [values if isinstance(values, Sequence) else (values,) for values in logprobs]
        if [*map(len, columns)] != counts.tolist():
            raise SamplerError(
                f"the engine's reply to {rid} has other numbers of sampling log-probabilities than of ids"
            )
        kept_logprobs = np.fromiter(chain.from_iterable(columns), np.float32, len(kept_ids))
        support = replace(support, logprobs=np.minimum(kept_logprobs, 0))
        return SampledSupport(support, tuple(support.sampled_logprobs(sampled_ids).tolist()))
    if any(isinstance(value, Sequence) for value in logprobs):
        raise SamplerError(
            f"the engine's reply to {rid} has lists of sampling log-probabilities, requested were single ones"
        )
    return SampledSupport(
        support, tuple(min(float(value), 0.0) for value in logprobs if not isinstance(value, Sequence))
    )
