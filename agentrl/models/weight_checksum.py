"""Checksum of SGLang's ``/weights_checker`` for weights on a CPU."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch


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
