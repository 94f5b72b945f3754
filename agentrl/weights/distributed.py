"""Weights broadcast through a `torch.distributed` group of sender and engines: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from agentrl.broadcast import BroadcastGroup, host_towards, open_store
from agentrl.errors import EngineError
from agentrl.obs.waiting import waiting
from agentrl.protocols import EngineControl, LearnerGroup, TensorSpec, WeightGroup
from agentrl.weights.checksum import Bucket
from agentrl.weights.engines import Check, give_up, on_all
from agentrl.weights.tensor import each_bucket

_REFUSAL_S = 0.05
"""An engine that refuses a bucket mostly says so within this time; then nothing is broadcast."""
_SETTLE_S = 5.0
"""After a failure the other engines get this long to notice it."""


class _SilentError(EngineError):
    """An engine does not answer any more."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """A group that is ready."""

    engines: tuple[EngineControl, ...]
    ours: BroadcastGroup


class DistributedSync:
    """Broadcasts one bucket at a time to all engines, from this process.

    Each engine is told first what comes, so that one that refuses keeps nobody waiting. The group is made at the first
    push, kept for the next ones to the same engines, and made anew after a failure.

    Args:
        bucket_bytes: size of a bucket; a larger tensor makes one of its own.
        check: what engines are asked afterwards; see `Check`.
        backend: ``gloo``, or ``nccl`` where this process and all engines have GPUs of their own.
        timeout_s: seconds that making the group, or a tensor of a bucket, may take.

    """

    def __init__(
        self, *, bucket_bytes: int, check: str = "version", backend: str = "gloo", timeout_s: float = 300.0
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.check = check
        self.backend = backend
        self.timeout_s = timeout_s
        self._joined: _Joined | None = None

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights; see `WeightSync.push`.

        Raises:
            EngineError: an engine refused a bucket, died or did not answer in time, or the check afterwards fails.

        """
        check = Check(self.check)
        try:
            await on_all(engines, f"begin of the update to version {version}", lambda engine: engine.begin_update())
            buckets = check.watch(learner.weights(self.bucket_bytes))
            await each_bucket(buckets, partial(self._send, engines, version))
        except BaseException:
            await self.aclose()
            await give_up(engines)
            raise
        await check.of(engines, version)

    async def aclose(self) -> None:
        """Leave the group, and have the engines leave it."""
        joined, self._joined = self._joined, None
        if joined is None:
            return
        # At the same time: what either side still waits for ends when the other leaves.
        await asyncio.gather(self._close(joined.ours), self._leave(joined.engines, joined.ours.group))

    async def _send(
        self, engines: Sequence[EngineControl], version: int, bucket: Bucket, number: int, last: bool
    ) -> None:
        phase = f"weights of version {version}, bucket {number}"
        kept = self._joined is not None and self._joined.engines == tuple(engines)
        try:
            await self._broadcast(await self._group(engines), engines, bucket, version, phase, last=last)
        except EngineError as error:
            if number > 1 or not kept or isinstance(error, _SilentError):
                raise
            # An engine that was started anew since the last push knows nothing of the group.
            await self.aclose()
            await on_all(engines, phase, lambda engine: engine.begin_update())
            await self._broadcast(await self._group(engines), engines, bucket, version, phase, last=last)

    async def _broadcast(
        self,
        ours: BroadcastGroup,
        engines: Sequence[EngineControl],
        bucket: Bucket,
        version: int,
        phase: str,
        *,
        last: bool,
    ) -> None:
        """Announce a bucket to all engines, then send it.

        Raises:
            EngineError: names the engine and the bucket.
        """
        specs = [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in bucket]
        device = "cuda" if self.backend == "nccl" else "cpu"
        tensors = [tensor.to(device).contiguous() for _, tensor in bucket]
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(engine.update_from_group(ours.group, specs, version, last=last)) for engine in engines
        ]
        with waiting("engine", "broadcast", phase):
            early, _ = await asyncio.wait(tasks, timeout=_REFUSAL_S, return_when=asyncio.FIRST_COMPLETED)
            if all(task.exception() is None for task in early):
                tasks.append(asyncio.ensure_future(asyncio.to_thread(ours.broadcast, tensors)))
                await asyncio.wait(tasks, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
                if all(task.done() and task.exception() is None for task in tasks):
                    return
            await self._blame(tasks, engines, phase)

    async def _blame(self, tasks: Sequence[asyncio.Future[None]], engines: Sequence[EngineControl], phase: str) -> None:
        """Raise the error of the engine that a broadcast failed over."""
        first = next((number for number, task in enumerate(tasks) if task.done() and task.exception()), None)
        # Engines that still wait for the broadcast learn from this that it does not come.
        await self.aclose()
        late = (await asyncio.wait(tasks, timeout=_SETTLE_S))[1]
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        answers = await asyncio.gather(*(_answers(engine) for engine in engines))
        silent = [number for number, answer in enumerate(answers) if not answer]
        number = silent[0] if silent else first
        if number is None or number >= len(engines):
            number = next((n for n, task in enumerate(tasks[: len(engines)]) if task in late), 0)
        why = _error(tasks[number]) or f"it gave no answer within {self.timeout_s:g} s"
        kind, dead = (_SilentError, "it died or hangs: ") if number in silent else (EngineError, "")
        raise kind(f"engine {number} of {len(engines)} ({engines[number].url}), {phase}: {dead}{why}")

    async def _group(self, engines: Sequence[EngineControl]) -> BroadcastGroup:
        """Return a group with exactly these engines in it."""
        if self._joined is not None and self._joined.engines == tuple(engines):
            return self._joined.ours
        await self.aclose()
        sizes = dict(zip(engines, await asyncio.gather(*(engine.ranks() for engine in engines)), strict=True))
        first, size = {}, 1
        for engine in engines:
            first[engine], size = size, size + sizes[engine]
        host = next((found for engine in engines if not (found := host_towards(engine.url)).startswith("127.")), None)
        host = host or "127.0.0.1"
        store = open_store(host, self.timeout_s)
        group = WeightGroup(f"agentrl-{uuid.uuid4().hex[:12]}", host, store.port, size, self.backend)
        ours = asyncio.ensure_future(
            asyncio.to_thread(BroadcastGroup.join, group, 0, timeout_s=self.timeout_s, store=store)
        )
        try:
            await on_all(engines, "group of weights", lambda engine: engine.join_group(group, first[engine]))
            self._joined = _Joined(tuple(engines), await ours)
        except BaseException:
            ours.cancel()
            await self._leave(engines, group)
            raise
        return self._joined.ours

    async def _leave(self, engines: Sequence[EngineControl], group: WeightGroup) -> None:
        """Have engines leave a group; one that is gone has left it."""

        async def leave(engine: EngineControl) -> None:
            with contextlib.suppress(EngineError, TimeoutError):
                await asyncio.wait_for(engine.leave_group(group), _SETTLE_S)

        await asyncio.gather(*(leave(engine) for engine in engines))

    async def _close(self, ours: BroadcastGroup) -> None:
        """Leave our own group. Where an engine hangs, that lasts until the broadcast's time is up: nobody waits."""
        closing = asyncio.ensure_future(asyncio.to_thread(ours.close))
        await asyncio.wait([closing], timeout=_SETTLE_S)


async def _answers(engine: EngineControl) -> bool:
    try:
        return await asyncio.wait_for(engine.healthy(), _SETTLE_S)
    except TimeoutError:
        return False


def _error(task: asyncio.Future[None]) -> BaseException | None:
    return None if task.cancelled() or not task.done() else task.exception()
