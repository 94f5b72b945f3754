"""Experts of tokens in requests to an engine and in its replies, for routing replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.core.errors import SamplerError
from agentrl.core.experts import Experts
from agentrl.core.types import SamplingParams
from agentrl.inference.client.segments import Segment, Vocabulary
from agentrl.models.routing import KEY

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
