"""Experts of recorded tokens: ``[n, layers, K]`` of each node of a token graph, `Row` has those of a row."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl.core.experts import Experts, unknown_expert_mask, unknown_experts


def fill(experts: Experts, source: Experts) -> None:
    """Write experts of tokens where none are known."""
    unknown_tokens = unknown_expert_mask(experts)
    experts[unknown_tokens] = source[unknown_tokens]


def concatenate(parts: Sequence[Experts | None], sizes: Sequence[int]) -> Experts | None:
    """Return the experts of nodes that follow each other, of so many tokens; None if none are known."""
    like = next((node_experts for node_experts in parts if node_experts is not None), None)
    if like is None:
        return None
    filled = (
        unknown_experts(size, like) if node_experts is None else node_experts
        for node_experts, size in zip(parts, sizes, strict=True)
    )
    return np.concatenate([*filled])


def to_dict(experts: Experts | None) -> dict[str, Any] | None:
    """Return experts as JSON-able data."""
    if experts is None:
        return None
    data = base64.b64encode(experts.tobytes()).decode("ascii")
    return {"dtype": str(experts.dtype), "shape": list(experts.shape), "data": data}


def from_dict(data: dict[str, Any] | None) -> Experts | None:
    """Return what `to_dict` wrote."""
    if data is None:
        return None
    experts = np.frombuffer(base64.b64decode(data["data"]), np.dtype(data["dtype"]))
    return experts.reshape(data["shape"]).copy()
