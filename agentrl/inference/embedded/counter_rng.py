"""Counter-based random numbers: a hash of a request's seed and a token's position, without state.

What a request samples therefore depends neither on the other requests of its batch nor on earlier ones. A request that
was interrupted, by an abort or by the end of the engine, continues with the numbers it would have drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def as_uint64(seed: int) -> int:
    """Return an integer of any sign and size modulo 2**64."""
    return seed & _WORD


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a float64 in [0, 1) for each pair of a seed and a position.

    SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators") with the position as its
    counter: number ``position`` of the generator that starts at the hashed seed. Without the hash, neighbouring seeds
    would give the same numbers, shifted.
    """
    words = _mix(_mix(seeds_B + _GAMMA) + (positions_B + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
