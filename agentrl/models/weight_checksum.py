"""A checksum of a weight, as SGLang's ``/weights_checker`` gives it for weights on a CPU."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch


class Digits(Protocol):
    """A hash that is made."""

    def hexdigest(self) -> str:
        """Return hexadecimal digits."""
        ...


def digest(tensor: torch.Tensor) -> str:
    """Return the first 64 bits of the SHA-256 of a tensor's bytes, in 16 hexadecimal digits."""
    hasher = hashlib.sha256()
    hasher.update(raw_bytes(tensor))
    return short(hasher)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def short(hasher: Digits) -> str:
    """Return as many digits of a hash as `digest` does."""
    return hasher.hexdigest()[:16]
