"""Checksums that show whether the engines hold the weights that the learner sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import Protocol

import torch

from agentrl.models.sglang_gpu_checksum import GpuChecksum
from agentrl.models.weight_checksum import raw_bytes, short_digest

_FUSED = {
    ".q_proj.": (".qkv_proj.", 0),
    ".k_proj.": (".qkv_proj.", 1),
    ".v_proj.": (".qkv_proj.", 2),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}
"""Weights that SGLang fuses: by name of the part, the name of the fused weight and the part's index."""
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_ROWS = 64
"""SGLang pads the rows of vocabulary weights with zeros to a multiple of this."""
_ENGINE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which an engine may hold a weight, in addition to that in which it is sent."""


class Hash(Protocol):
    """An incremental hash, such as those of `hashlib`."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of all bytes in hexadecimal."""
        ...


KINDS: Mapping[str, Callable[[memoryview], Hash]] = {"sha256": hashlib.sha256, "words": GpuChecksum}
"""Hashes by `EngineControl.checksum_kind`."""


class Checksums:
    """Checksums of the weights that are sent to the engines.

    An engine may hold a weight in another dtype, padded with rows of zeros, or fused into a larger weight, so each name
    has several valid checksums. SHA-256 takes about as long as reading the weights three times.
    """

    def __init__(self, kinds: Collection[str]) -> None:
        """Compute the ``kinds`` of `KINDS` that the engines report."""
        self._kinds = [KINDS[kind] for kind in kinds]
        self._digests: dict[str, set[str]] = {}
        self._wholes: dict[str, tuple[int, list[Hash]]] = {}
        """Of weights that an engine may fuse: the number of parts so far, and hashes by dtype and kind."""

    def add(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Add the weights of a bucket."""
        for name, tensor in named:
            self._add(name, tensor)

    def difference(self, engine_checksums: Mapping[str, str]) -> str | None:
        """Return how an engine's checksums, by the engine's names, differ from the sent weights, or None."""
        valid_checksums = self._digests | {
            name: {short_digest(hasher) for hasher in hashers} for name, (_, hashers) in self._wholes.items()
        }
        wrong = [
            name
            for name in engine_checksums
            if name in valid_checksums and engine_checksums[name] not in valid_checksums[name]
        ]
        strange = [name for name in engine_checksums if name not in valid_checksums]
        not_loaded = [
            name
            for name in self._digests
            if name not in engine_checksums and _find_fused(name)[0] not in engine_checksums
        ]
        for fault, names in (("differ", wrong), ("were never sent", strange), ("are not there", not_loaded)):
            if names:
                return f"{len(names)} of {len(engine_checksums)} weights {fault}: {', '.join(sorted(names)[:3])}"
        return None

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        fused_name, index = _find_fused(name)
        shards, hashers = self._wholes.get(fused_name, (0, []))
        digests = self._digests[name] = set()
        encodings = [raw_bytes(tensor.to(dtype)) for dtype in dict.fromkeys((tensor.dtype, *_ENGINE_DTYPES))]
        for number, (data, make) in enumerate(product(encodings, self._kinds)):
            hasher = make(data)
            digests.add(short_digest(hasher))
            if name.endswith(_PADDED):
                hasher.update(memoryview(bytes(-len(tensor) % _ROWS * (len(data) // len(tensor)))))
                digests.add(short_digest(hasher))
            if fused_name and index == 0:
                hashers = [*hashers[:number], make(data)]
            elif fused_name:
                hashers[number].update(data)
        if fused_name:
            assert index in (0, shards), f"{name} comes before an earlier part of {fused_name}"
            self._wholes[fused_name] = (index + 1, hashers)


def _find_fused(name: str) -> tuple[str, int]:
    """Return SGLang's name of the fused weight that contains this one, or an empty name, and the part's index."""
    for shard_name, (fused_name, index) in _FUSED.items():
        if shard_name in name:
            return name.replace(shard_name, fused_name), index
    return "", 0
