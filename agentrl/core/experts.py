"""Experts of tokens, ``[n, layers, K]``: which ones routers chose. A node of a token graph has those of its tokens.

Of a token whose experts are not known, all numbers are the highest one of the dtype.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Experts = NDArray[np.uint8] | NDArray[np.int16]


def unknown_expert(dtype: DTypeLike) -> int:
    """Return the expert number that stands for "not known": the highest of the dtype."""
    return int(np.iinfo(np.dtype(dtype)).max)


def unknown_expert_mask(experts: Experts) -> NDArray[np.bool_]:
    """Return ``[n]`` bools: whether the experts of each token are not known."""
    mask: NDArray[np.bool_] = experts[:, 0, 0] == unknown_expert(experts.dtype)
    return mask


def unknown_experts(size: int, like: Experts) -> Experts:
    """Return ``[size, layers, K]`` experts of tokens whose experts are not known, with the shape and dtype of ``like``."""
    return np.full((size, *like.shape[1:]), unknown_expert(like.dtype), like.dtype)


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
