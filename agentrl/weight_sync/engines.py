"""Calls of all engines that every transport makes: begin and cancel updates, check the result."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import product

import torch

from agentrl.core.errors import EngineError
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.inference.base import EngineControl
from agentrl.learner.base import WeightBucket
from agentrl.models.weight_checksum import GpuChecksum, Hash, raw_bytes, short_digest
from agentrl.obs.waiting import waiting
from agentrl.weight_sync.base import SyncedWeights

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


class OtherWeightsError(EngineError):
    """An engine has other weights than those that were sent to it, by their checksums."""


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
        """State of weights that an engine may fuse: the number of parts so far, and hashes by dtype and kind."""

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
                first = ", ".join(sorted(names, key=_in_order_of_layers)[:3])
                return f"{len(names)} of {len(engine_checksums)} weights {fault}: {first}"
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


def _in_order_of_layers(name: str) -> list[tuple[int, str]]:
    """Sort names by the numbers in them, those of layers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _find_fused(name: str) -> tuple[str, int]:
    """Return SGLang's name of the fused weight that contains this one, or an empty name, and the part's index."""
    for shard_name, (fused_name, index) in _FUSED.items():
        if shard_name in name:
            return name.replace(shard_name, fused_name), index
    return "", 0


async def call_all(
    engines: Sequence[EngineControl], phase: str, call: Callable[[EngineControl], Awaitable[None]]
) -> None:
    """Call all engines concurrently, and wait for all of them even if one fails.

    Raises:
        EngineError: with the number of the engine, and the phase. `OtherWeightsError` stays that.
    """

    async def call_one(number: int, engine: EngineControl) -> None:
        with waiting("engine", f"{number} of {len(engines)}", phase):
            await call(engine)

    results = await asyncio.gather(*(call_one(*numbered) for numbered in enumerate(engines)), return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, EngineError):
            kind = OtherWeightsError if isinstance(result, OtherWeightsError) else EngineError
            raise kind(f"engine {number} of {len(engines)}, {phase}: {result}") from result
        if isinstance(result, BaseException):
            raise result


class UpdateCheck:
    """The check of the engines after one update, according to ``weights.check``."""

    def __init__(self, mode: str, kinds: Collection[str] = ()) -> None:
        """``mode`` is ``none``, ``version`` or ``checksum``; ``kinds`` are the engines' kinds of checksums."""
        self._mode = mode
        self._sums = Checksums(kinds)
        self._fingerprint = self._bytes = 0

    @classmethod
    async def start(cls, mode: str, engines: Sequence[EngineControl]) -> UpdateCheck:
        """Return the check of the next update of these engines.

        Raises:
            EngineError: an engine does not answer.
        """
        if mode != "checksum":
            return cls(mode)
        return cls(mode, set(await asyncio.gather(*(engine.checksum_kind() for engine in engines))))

    async def add(self, bucket: WeightBucket) -> None:
        """Add a bucket that is sent."""
        self._fingerprint ^= await asyncio.to_thread(bucket.fingerprint)
        self._bytes += total_bytes(*bucket.specs)
        if self._mode == "checksum":
            await asyncio.to_thread(lambda: self._sums.add(bucket.tensors()))

    async def verify(self, engines: Sequence[EngineControl], version: int) -> SyncedWeights:
        """Check all engines, and return what was sent.

        Raises:
            EngineError: an engine samples with another version, holds other weights, or cannot report them.
        """
        if self._mode != "none":
            await check_version(engines, version)
        if self._mode == "checksum":
            await self._checksums(engines)
        return SyncedWeights(self._fingerprint, self._bytes)

    async def _checksums(self, engines: Sequence[EngineControl]) -> None:
        async def compare(engine: EngineControl) -> None:
            difference = self._sums.difference(await engine.checksums())
            if difference is not None:
                raise OtherWeightsError(f"its weights are not those that were sent: {difference}")

        await call_all(engines, "check of the weights", compare)


async def check_version(engines: Sequence[EngineControl], version: int) -> None:
    """Check that every engine samples with ``version``.

    Raises:
        EngineError: an engine reports another version, or none.
    """

    async def check(engine: EngineControl) -> None:
        sampled_version = await engine.version()
        if sampled_version != version:
            raise EngineError(f"it samples with version {sampled_version}, but {version} was sent")

    await call_all(engines, "check of the policy version", check)


@asynccontextmanager
async def paused(engines: Sequence[EngineControl], mode: str) -> AsyncIterator[None]:
    """Pause the generations in progress on all engines in the block; see `EngineControl.pause`.

    Raises:
        EngineError: an engine does not pause or does not continue. All others continue.
    """
    try:
        await call_all(engines, "pause of generations", lambda engine: engine.pause(mode))
        yield
    finally:
        await call_all(engines, "end of the pause", lambda engine: engine.resume())


async def begin_updates(engines: Sequence[EngineControl], version: int) -> None:
    """Begin an update on all engines: no generation starts until all weights have arrived.

    Raises:
        EngineError: an engine does not stop sampling.
    """
    await call_all(engines, f"begin of the update to version {version}", lambda engine: engine.updates.begin())


async def cancel_updates(engines: Sequence[EngineControl], *, limit_s: float = 5.0) -> None:
    """Cancel the update on all engines. Errors are ignored, as the sync has already failed."""

    async def cancel(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            await asyncio.wait_for(engine.updates.cancel(), limit_s)

    await asyncio.gather(*(cancel(engine) for engine in engines))
