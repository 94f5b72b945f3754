"""Weight sync by broadcast in a `torch.distributed` group of the learner's rank 0 and the engines: NCCL or gloo."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed.base import WeightGroup
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.obs.waiting import waiting
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import begin_updates, call_all

_REFUSAL_S = 0.05
"""Wait before a broadcast: most engines that refuse a bucket answer within this time, and then nothing is broadcast. NCCL
sends a bucket in less time and aborts a broadcast at once, so it waits only in a group's first broadcast."""
_SETTLE_S = 5.0
"""Seconds for the other engines to notice a failure."""


class _SilentError(EngineError):
    """An engine no longer answers."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """A group that all members have joined."""

    learner: LearnerGroup
    engines: tuple[EngineControl, ...]
    group: WeightGroup

    def has(self, learner: LearnerGroup, engines: Sequence[EngineControl]) -> bool:
        """Return whether exactly these are its members."""
        return self.learner is learner and self.engines == tuple(engines)


class DistributedSync(BucketwiseSync):
    """The learner's rank 0 broadcasts each bucket to all engines.

    Each bucket is announced to the engines first, so that a refusal blocks no other process. The group is created at the
    first push, kept for further pushes to the same engines, and created again after a failure.

    Args:
        bucket_bytes: size of a bucket; a larger tensor gets a separate bucket.
        dtype: weights are cast to it before they are sent; None keeps the learner's dtype.
        check: how engines are checked afterwards; see `UpdateCheck`.
        backend: ``gloo``, or ``nccl`` if rank 0 and all engines have separate GPUs.
        timeout_s: time limit for creating the group, and for each bucket.

    """

    def __init__(
        self,
        *,
        bucket_bytes: int,
        dtype: str | None = None,
        check: str = "version",
        backend: str = "gloo",
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(bucket_bytes=bucket_bytes, dtype=dtype, check=check)
        self.backend = backend
        self.timeout_s = timeout_s
        self._joined: _Joined | None = None
        self._connected: WeightGroup | None = None
        """The last group in which a broadcast has succeeded."""

    async def aclose(self) -> None:
        """Let the learner and the engines leave the group."""
        joined, self._joined = self._joined, None
        if joined is not None:
            await _leave(joined.learner, joined.engines, joined.group)

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        phase = f"weights of version {version}, bucket {number}"
        kept = self._joined is not None and self._joined.has(learner, engines)
        try:
            await self._broadcast(await self._group(learner, engines), engines, bucket, version, phase)
        except EngineError as error:
            if number > 1 or not kept or isinstance(error, _SilentError):
                raise
            # An engine that was restarted since the last push is not in the group.
            await self.aclose()
            await begin_updates(engines, version)
            await self._broadcast(await self._group(learner, engines), engines, bucket, version, phase)

    async def _broadcast(
        self, group: WeightGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, phase: str
    ) -> None:
        """Announce a bucket to all engines, then let rank 0 broadcast it.

        Raises:
            EngineError: names the engine and the bucket.
        """
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(engine.updates.from_group(group, bucket.specs, version, last=bucket.last))
            for engine in engines
        ]
        with waiting("engine", "broadcast", phase):
            wait_s = _REFUSAL_S if self.backend == "gloo" or group != self._connected else 0.0
            early, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if all(task.exception() is None for task in early):
                tasks.append(asyncio.ensure_future(asyncio.to_thread(bucket.broadcast)))
                await asyncio.wait(tasks, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
                if all(task.done() and task.exception() is None for task in tasks):
                    self._connected = group
                    return
            await self._blame(tasks, engines, phase)

    async def _blame(self, tasks: Sequence[asyncio.Future[None]], engines: Sequence[EngineControl], phase: str) -> None:
        """Raise the error of the engine that made a broadcast fail, or the learner's error."""
        first = next((number for number, task in enumerate(tasks) if task.done() and task.exception()), None)
        # This ends the wait of engines for the broadcast.
        await self.aclose()
        late = (await asyncio.wait(tasks, timeout=_SETTLE_S))[1]
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks[len(engines) :]:
            if isinstance(error := _error(task), LearnerError):
                raise error
        answers = await asyncio.gather(*(_answers(engine) for engine in engines))
        silent = [number for number, answer in enumerate(answers) if not answer]
        number = silent[0] if silent else first
        if number is None or number >= len(engines):
            number = next((n for n, task in enumerate(tasks[: len(engines)]) if task in late), 0)
        why = _error(tasks[number]) or f"it gave no answer within {self.timeout_s:g} s"
        kind, dead = (_SilentError, "it died or hangs: ") if number in silent else (EngineError, "")
        raise kind(f"engine {number} of {len(engines)} ({engines[number].url}), {phase}: {dead}{why}")

    async def _group(self, learner: LearnerGroup, engines: Sequence[EngineControl]) -> WeightGroup:
        """Return a group with exactly these members."""
        if self._joined is not None and self._joined.has(learner, engines):
            return self._joined.group
        await self.aclose()
        sizes = dict(zip(engines, await asyncio.gather(*(engine.groups.ranks() for engine in engines)), strict=True))
        first, size = {}, 1
        for engine in engines:
            first[engine], size = size, size + sizes[engine]
        urls = [engine.url for engine in engines]
        group = await asyncio.to_thread(learner.open_group, urls, size, self.backend, self.timeout_s)
        ours = asyncio.ensure_future(asyncio.to_thread(learner.join_group, group))
        try:
            await call_all(engines, "group of weights", lambda engine: engine.groups.join(group, first[engine]))
            await ours
        except BaseException:
            await _leave(learner, engines, group)
            await asyncio.gather(ours, return_exceptions=True)
            raise
        self._joined = _Joined(learner, tuple(engines), group)
        return group


async def _leave(learner: LearnerGroup, engines: Sequence[EngineControl], group: WeightGroup) -> None:
    """Let all members leave a group concurrently: the wait of each side ends when the other leaves."""

    async def leave(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # a dead engine has left it
            await asyncio.wait_for(engine.groups.leave(group), _SETTLE_S)

    await asyncio.gather(asyncio.to_thread(learner.leave_group), *(leave(engine) for engine in engines))


async def _answers(engine: EngineControl) -> bool:
    try:
        return await asyncio.wait_for(engine.healthy(), _SETTLE_S)
    except TimeoutError:
        return False


def _error(task: asyncio.Future[None]) -> BaseException | None:
    return None if task.cancelled() or not task.done() else task.exception()
