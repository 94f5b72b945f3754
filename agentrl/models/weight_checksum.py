"""Checksums of SGLang's ``/weights_checker`` for weights on a CPU and on a GPU, and a fast fingerprint on any device.

The checksum of weights on a GPU (the same in 0.5.17 and 0.5.23) is computed on the CPU: each 32-bit word is mixed with its
index by the finalizer of MurmurHash3, with two sets of constants. The results are summed by tile, each tile's pair of sums is
mixed with the number of bytes, and the sum over tiles passes the finalizer of SplitMix64.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]

_TILE = 8192
"""Words per tile."""
_GPU_CHUNK = 64 * _TILE
"""Words that are mixed at once, so that intermediate results stay in the CPU's cache."""
_SEEDS = (0x243F6A88, (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
_INDEX_MIXING = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Factor and rotation of a word's index, for each of the two sums."""
_LOW_64 = (1 << 64) - 1


class GpuChecksum:
    """Incremental checksum with the interface of `hashlib`'s hashes."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        """Start the checksum with ``data``."""
        self._rest = b""
        """Bytes of an incomplete word."""
        self._words = 0
        self._sums: list[NDArray[np.uint64]] = []
        """Sums ``[2, tiles]`` of each update, modulo 2^32."""
        self._first_tiles: list[int] = []
        self.update(data)

    def copy(self) -> GpuChecksum:
        """Return an independent copy of the state."""
        duplicate = GpuChecksum()
        duplicate._rest, duplicate._words = self._rest, self._words
        duplicate._sums, duplicate._first_tiles = [*self._sums], [*self._first_tiles]
        return duplicate

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        if self._rest:
            data = self._rest + bytes(data)
        word_bytes = len(data) // 4 * 4
        self._rest = bytes(data[word_bytes:])
        words = np.frombuffer(data[:word_bytes], np.uint32)
        at = 0
        while at < len(words):
            # At most to the end of a chunk, so that only the first tile can be incomplete.
            size = _GPU_CHUNK - self._words % _GPU_CHUNK
            self._add(words[at : at + size])
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
        for first, tile_sums in zip(self._first_tiles, self._sums, strict=True):
            sums[:, first : first + tile_sums.shape[1]] += tile_sums
        mixed = _mix((sums.astype(np.uint32)) ^ np.uint32(4 * self._words & 0xFFFFFFFF)).astype(np.uint64)
        with np.errstate(over="ignore"):
            total = int(((mixed[0] << np.uint64(32)) | mixed[1]).sum(dtype=np.uint64))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            total = (total ^ total >> shift) * factor & _LOW_64
        return f"{total ^ total >> 31:016x}"

    def _add(self, words: Words) -> None:
        indices = np.arange(self._words, self._words + len(words), dtype=np.uint64).astype(np.uint32)
        first_tile = self._words // _TILE
        borders = np.arange((first_tile + 1) * _TILE, self._words + len(words), _TILE) - self._words
        starts = np.concatenate([[0], borders])
        sums = []
        for seed, (factor, rotation) in zip(_SEEDS, _INDEX_MIXING, strict=True):
            rotated = (indices << np.uint32(rotation)) | (indices >> np.uint32(32 - rotation))
            mixed = _mix(words ^ ((indices * np.uint32(factor) + np.uint32(seed)) ^ rotated))
            sums.append(np.add.reduceat(mixed, starts, dtype=np.uint64))
        self._sums.append(np.stack(sums))
        self._first_tiles.append(first_tile)
        self._words += len(words)


def _mix(words: Words) -> Words:
    words = (words ^ words >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    words = (words ^ words >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed: Words = words ^ words >> np.uint32(16)
    return mixed


_CHUNK = 1 << 20
"""Words that are mixed at once: 8 MiB, which stay in a CPU's cache."""


class Hash(Protocol):
    """An incremental hash, such as those of `hashlib`."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes in hexadecimal."""
        ...


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the first 64 bits of the SHA-256 of a tensor's bytes, in 16 hexadecimal digits."""
    return short_digest(hashlib.sha256(raw_bytes(tensor)))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def short_digest(hasher: Hash) -> str:
    """Return the first 16 hexadecimal digits of a hash, as `tensor_checksum` does."""
    return hasher.hexdigest()[:16]


def fingerprint(flat: torch.Tensor) -> int:
    """Return 64 bits that differ if any of ``flat``, uint8 bytes on any device, differs; the order of words does not count.

    Each 64-bit word is multiplied by a part of itself, so that a change of one word is not undone by that of another. It
    reads the bytes once, where they are.
    """
    word_bytes = len(flat) // 8 * 8
    words = [*torch.split(flat[:word_bytes].view(torch.int64), _CHUNK)]
    if word_bytes < len(flat):
        words.append(torch.nn.functional.pad(flat[word_bytes:], (0, 8 - len(flat) + word_bytes)).view(torch.int64))
    sums = [(chunk * ((chunk >> 29) | 1)).sum() for chunk in words]
    return int(torch.stack(sums).sum()) & (1 << 64) - 1 if sums else 0
