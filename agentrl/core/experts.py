"""Experts of tokens, ``[n, layers, K]``: which ones routers chose.

Of a token whose experts are not known, all numbers are the highest one of the dtype.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

Experts = NDArray[np.uint8] | NDArray[np.int16]


def unknown_number(dtype: DTypeLike) -> int:
    """Return the number of no expert, for tokens whose experts are not known."""
    return int(np.iinfo(np.dtype(dtype)).max)


def unknown(experts: Experts) -> NDArray[np.bool_]:
    """Return of which tokens ``[n]`` the experts are not known."""
    found: NDArray[np.bool_] = experts[:, 0, 0] == unknown_number(experts.dtype)
    return found


def no_experts(size: int, like: Experts) -> Experts:
    """Return experts of ``size`` tokens of which none are known."""
    return np.full((size, *like.shape[1:]), unknown_number(like.dtype), like.dtype)
