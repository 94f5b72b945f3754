"""Experts of tokens, ``[n, layers, K]``: which ones routers chose.

Of a token whose experts are not known, all numbers are the highest one of the dtype.
"""

from __future__ import annotations

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
