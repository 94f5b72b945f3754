"""Experts of recorded tokens: ``[n, layers, K]`` of each node of a token graph, `Row` has those of a row."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.uint8] | NDArray[np.int16]


def unknown(experts: Experts) -> NDArray[np.bool_]:
    """Return of which tokens ``[n]`` the experts are not known."""
    found: NDArray[np.bool_] = experts[:, 0, 0] == np.iinfo(experts.dtype).max
    return found


def no_experts(size: int, like: Experts) -> Experts:
    """Return experts of ``size`` tokens of which none are known."""
    return np.full((size, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def fill(held: Experts, given: Experts) -> None:
    """Write experts of tokens where none are known."""
    missing = unknown(held)
    held[missing] = given[missing]


def joined(parts: Sequence[Experts | None], sizes: Sequence[int]) -> Experts | None:
    """Return the experts of nodes that follow each other, of so many tokens; None if none are known."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    filled = (no_experts(size, like) if part is None else part for part, size in zip(parts, sizes, strict=True))
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
    found = np.frombuffer(base64.b64decode(data["data"]), np.dtype(data["dtype"]))
    return found.reshape(data["shape"]).copy()
