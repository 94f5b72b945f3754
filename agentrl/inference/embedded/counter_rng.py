"""Random numbers without a state: a hash of a request's seed and a token's position.

So what a request draws depends neither on the requests beside it nor on those before it, and one that is interrupted,
by an abort or by the end of the engine, draws afterwards what it would have drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def as_word(seed: int) -> int:
    """Return any integer as an unsigned 64-bit one."""
    return seed & _WORD


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position.

    SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators"), counted rather than stepped:
    number ``position`` of the generator that starts at the hashed seed. Hashing keeps seeds that lie beside each
    other from giving the same numbers shifted.
    """
    words = _mix(_mix(seeds_B + _GAMMA) + (positions_B + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
