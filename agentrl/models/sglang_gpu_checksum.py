"""A checksum of a weight, as SGLang's ``/weights_checker`` gives it for weights on a GPU (0.5.17 and 0.5.23 alike).

Each 32-bit word is mixed with its place, twice, by the finaliser of MurmurHash3; the results are added up by tile, each
tile's pair is mixed with the number of bytes, and the tiles, added up, go through the finaliser of SplitMix64.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_TILE = 8192
"""Words."""
_CHUNK = 64 * _TILE
"""Words that are mixed at a time, so that the intermediate results stay in the processor's cache."""
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Factor and rotation of a word's place, for each of the two."""
_LOW_64 = (1 << 64) - 1


class WordHash:
    """Takes bytes piece by piece, as the hashes of `hashlib` do."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        """Begin with ``data``."""
        self._rest = b""
        """Bytes of a word that is not whole yet."""
        self._words = 0
        self._sums: list[NDArray[np.uint64]] = []
        """``[2, tiles]`` of each piece, modulo 2^32."""
        self._first_tiles: list[int] = []
        self.update(data)

    def copy(self) -> WordHash:
        """Return another one that has taken the same."""
        other = WordHash()
        other._rest, other._words = self._rest, self._words
        other._sums, other._first_tiles = [*self._sums], [*self._first_tiles]
        return other

    def update(self, data: bytes | memoryview) -> None:
        """Take more bytes."""
        if self._rest:
            data = self._rest + bytes(data)
        whole = len(data) // 4 * 4
        self._rest = bytes(data[whole:])
        words = np.frombuffer(data[:whole], np.uint32)
        at = 0
        while at < len(words):
            # Up to the border of a chunk, so that only the first tile may be one that was begun before.
            size = _CHUNK - self._words % _CHUNK
            self._take(words[at : at + size])
            at += size

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits."""
        if self._rest:
            padded = self.copy()
            padded.update(bytes(4 - len(self._rest)))
            return padded.hexdigest()
        if not self._words:
            return f"{0:016x}"
        sums = np.zeros((2, -(-self._words // _TILE)), np.uint64)
        for first, part in zip(self._first_tiles, self._sums, strict=True):
            sums[:, first : first + part.shape[1]] += part
        mixed = _mix((sums.astype(np.uint32)) ^ np.uint32(4 * self._words & 0xFFFFFFFF)).astype(np.uint64)
        with np.errstate(over="ignore"):
            total = int(((mixed[0] << np.uint64(32)) | mixed[1]).sum(dtype=np.uint64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            total = (total ^ total >> shift) * factor & _LOW_64
        return f"{total ^ total >> 31:016x}"

    def _take(self, words: Words) -> None:
        places = np.arange(self._words, self._words + len(words), dtype=np.uint64).astype(np.uint32)
        first = self._words // _TILE
        borders = np.arange((first + 1) * _TILE, self._words + len(words), _TILE) - self._words
        starts = np.concatenate([[0], borders])
        sums = []
        for seed, (factor, turn) in zip(_SEEDS, _PLACES, strict=True):
            turned = (places << np.uint32(turn)) | (places >> np.uint32(32 - turn))
            mixed = _mix(words ^ ((places * np.uint32(factor) + np.uint32(seed)) ^ turned))
            sums.append(np.add.reduceat(mixed, starts, dtype=np.uint64))
        self._sums.append(np.stack(sums))
        self._first_tiles.append(first)
        self._words += len(words)


def _mix(words: Words) -> Words:
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed: Words = words ^ words >> np.uint32(16)
    return mixed
