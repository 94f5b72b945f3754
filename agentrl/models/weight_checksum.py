"""Checksum of SGLang's ``/weights_checker`` for weights on a CPU, and a fast fingerprint of weights on any device."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch

_CHUNK = 1 << 20
"""Words that are mixed at once: 8 MiB, which stay in a CPU's cache."""


class HexDigest(Protocol):
    """A hash object that can return its digest."""

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal digits."""
        ...


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the first 64 bits of the SHA-256 of a tensor's bytes, in 16 hexadecimal digits."""
    hasher = hashlib.sha256()
    hasher.update(raw_bytes(tensor))
    return short_digest(hasher)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def short_digest(hasher: HexDigest) -> str:
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
