"""Weight sync by changes: only what differs from the last sync is sent, to engines with agentrl's weight loader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from uuid import uuid4

import torch
from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.distributed.sglang_loader import LOADERS
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import (
    Changes,
    EncodedBucket,
    encode,
    encode_changes,
)
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.weight_sync.base import SyncedWeights, TransportOptions
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import call_all


class DeltaSync(BucketwiseSync):
    """Transfers the numbers that have changed since the last sync, to engines that have exactly its weights; others get all.

    Each sync has a name. The learner's rank 0 keeps a copy of its weights, and an engine that has them knows the name. Engines
    refuse changes to weights of another name, and changes with another SHA-256 sum than was sent.
    """

    engine_options = {"custom_weight_loader": [*LOADERS]}  # noqa: RUF012 - as declared by the base class

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self._held: dict[EngineControl, str] = {}
        """Name of the weights that each engine has."""
        self._base: str | None = None
        """Name of the weights that the learner has a copy of."""
        self._learner: LearnerGroup | None = None
        """That learner."""
        self._version = 0
        """Their version."""
        self._fingerprint = 0
        """Their fingerprint."""
        self._new = ""
        """Name of the weights that are being sent."""
        self._wants_all: set[EngineControl] = set()
        """Engines that get all weights."""
        self._bytes = 0

    @classmethod
    @override
    def faults(cls, config: Config) -> Iterator[str]:
        if config.placement.shares_gpus:
            yield (
                "weights.transport=delta with placement.mode=colocate: engines release the weights that changes are to; set "
                "weights.transport=tensor, or ipc on GPUs"
            )

    @override
    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync what has changed. The first sync, and that to a restarted engine, sends all of them.

        Raises:
            EngineError: see `BucketwiseSync.sync_weights`, or an engine has other weights than its last sync has sent.
            LearnerError: a weight is not finite.
        """
        if learner is not self._learner:
            self._base, self._learner = None, learner
        self._wants_all = {engine for engine in engines if not await self._has_base(engine)}
        again = self._base is not None and version == self._version and self._wants_all == set(engines)
        if self._wants_all == set(engines) and not again:
            self._base = None
        self._new, self._bytes = (self._base if again and self._base else uuid4().hex), 0
        for engine in engines:
            self._held.pop(engine, None)
        try:
            sent = await super().sync_weights(learner, engines, version)
        except BaseException:
            # The learner's copy may be of some new and some old weights.
            self._base = self._base if again else None
            raise
        if again and sent.fingerprint != self._fingerprint:
            self._base = None  # other weights under the same version
        else:
            self._held |= dict.fromkeys(engines, self._new)
            self._base, self._version, self._fingerprint = self._new, version, sent.fingerprint
        return replace(sent, bytes=self._bytes)

    async def _has_base(self, engine: EngineControl) -> bool:
        """Return whether changes can be sent to an engine: it was not restarted since it got the base."""
        if self._base is None or self._held.get(engine) != self._base:
            return False
        return await engine.version() == self._version

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        def encode_bucket(changes: Changes, base: str | None) -> EncodedBucket:
            return encode_changes(changes, base=base, held=self._new, number=number - 1, last=bucket.last)

        changed: EncodedBucket | None = None
        everything: EncodedBucket | None = None
        sizes = [0]
        if self._new != self._base:
            changes = await asyncio.to_thread(bucket.changes, self._base, self._new)
            changed = await asyncio.to_thread(encode_bucket, changes, self._base)
            sizes.append(len(changes.payload))
        if self._base is None:
            everything = changed
        elif self._wants_all:
            changes = await asyncio.to_thread(lambda: _encode_all(bucket.tensors()))
            everything = await asyncio.to_thread(encode_bucket, changes, None)
            sizes.append(len(changes.payload))
        self._bytes += max(sizes)

        async def send(engine: EngineControl) -> None:
            changes = everything if engine in self._wants_all else changed
            assert changes is not None, "an engine that wants all weights makes the bucket of all"
            await engine.updates.from_changes(changes, version, last=bucket.last, ranks=await engine.groups.ranks())

        await call_all(engines, f"changes of version {version}, bucket {number}", send)


def _encode_all(named: Sequence[tuple[str, torch.Tensor]]) -> Changes:
    encoded_weights = [encode(name, tensor, None) for name, tensor in named]
    pieces = [piece for _, weight_pieces in encoded_weights for piece in weight_pieces]
    return Changes([header for header, _ in encoded_weights], torch.cat(pieces))
