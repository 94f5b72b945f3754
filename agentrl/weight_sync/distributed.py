"""Weights broadcast through a `torch.distributed` group of the learner's rank 0 and the engines: NCCL on GPUs, or gloo."""

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
from agentrl.weight_sync.engines import begin_all, on_all

_REFUSAL_S = 0.05
"""An engine that refuses a bucket mostly says so within this time; then nothing is broadcast. NCCL gives a broadcast up at
once, so nobody waits there, as it sends a bucket in less; but for a group's first one, in which it waits for all ranks."""
_SETTLE_S = 5.0
"""After a failure the other engines get this long to notice it."""


class _SilentError(EngineError):
    """An engine does not answer any more."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """A group that is ready."""

    learner: LearnerGroup
    engines: tuple[EngineControl, ...]
    group: WeightGroup

    def has(self, learner: LearnerGroup, engines: Sequence[EngineControl]) -> bool:
        """Return whether exactly these are in it."""
        return self.learner is learner and self.engines == tuple(engines)


class DistributedSync(BucketwiseSync):
    """Has the learner's rank 0 broadcast each bucket to all engines.

    Each engine is told first what comes, so that one that refuses keeps nobody waiting. The group is made at the first
    push, kept for the next ones to the same engines, and made anew after a failure.

    Args:
        bucket_bytes: size of a bucket; a larger tensor makes one of its own.
        dtype: what weights are cast to before they are sent; None leaves them as the learner holds them.
        check: what engines are asked afterwards; see `Check`.
        backend: ``gloo``, or ``nccl`` where rank 0 and all engines have GPUs of their own.
        timeout_s: seconds that making the group, or a bucket, may take.

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
        self._met: WeightGroup | None = None
        """The last group in which a broadcast has passed."""

    async def aclose(self) -> None:
        """Have the learner and the engines leave the group."""
        joined, self._joined = self._joined, None
        if joined is not None:
            await _leave(joined.learner, joined.engines, joined.group)

    async def _send(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        phase = f"weights of version {version}, bucket {number}"
        kept = self._joined is not None and self._joined.has(learner, engines)
        try:
            await self._broadcast(await self._group(learner, engines), engines, bucket, version, phase)
        except EngineError as error:
            if number > 1 or not kept or isinstance(error, _SilentError):
                raise
            # An engine that was started anew since the last push knows nothing of the group.
            await self.aclose()
            await begin_all(engines, version)
            await self._broadcast(await self._group(learner, engines), engines, bucket, version, phase)

    async def _broadcast(
        self, group: WeightGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, phase: str
    ) -> None:
        """Announce a bucket to all engines, then have it sent.

        Raises:
            EngineError: names the engine and the bucket.
        """
        tasks: list[asyncio.Future[None]] = [
            asyncio.ensure_future(engine.update_from_group(group, bucket.specs, version, last=bucket.last))
            for engine in engines
        ]
        with waiting("engine", "broadcast", phase):
            patience = _REFUSAL_S if self.backend == "gloo" or group != self._met else 0.0
            early, _ = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if all(task.exception() is None for task in early):
                tasks.append(asyncio.ensure_future(asyncio.to_thread(bucket.broadcast)))
                await asyncio.wait(tasks, timeout=self.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
                if all(task.done() and task.exception() is None for task in tasks):
                    self._met = group
                    return
            await self._blame(tasks, engines, phase)

    async def _blame(self, tasks: Sequence[asyncio.Future[None]], engines: Sequence[EngineControl], phase: str) -> None:
        """Raise the error of the engine that a broadcast failed over, or the learner's own."""
        first = next((number for number, task in enumerate(tasks) if task.done() and task.exception()), None)
        # Engines that still wait for the broadcast learn from this that it does not come.
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
        """Return a group with exactly these in it."""
        if self._joined is not None and self._joined.has(learner, engines):
            return self._joined.group
        await self.aclose()
        sizes = dict(zip(engines, await asyncio.gather(*(engine.ranks() for engine in engines)), strict=True))
        first, size = {}, 1
        for engine in engines:
            first[engine], size = size, size + sizes[engine]
        urls = [engine.url for engine in engines]
        group = await asyncio.to_thread(learner.open_group, urls, size, self.backend, self.timeout_s)
        ours = asyncio.ensure_future(asyncio.to_thread(learner.join_group, group))
        try:
            await on_all(engines, "group of weights", lambda engine: engine.join_group(group, first[engine]))
            await ours
        except BaseException:
            await _leave(learner, engines, group)
            await asyncio.gather(ours, return_exceptions=True)
            raise
        self._joined = _Joined(learner, tuple(engines), group)
        return group


async def _leave(learner: LearnerGroup, engines: Sequence[EngineControl], group: WeightGroup) -> None:
    """Have all leave a group at the same time: what either side still waits for ends when the other leaves."""

    async def leave(engine: EngineControl) -> None:
        with contextlib.suppress(EngineError, TimeoutError):  # one that is gone has left it
            await asyncio.wait_for(engine.leave_group(group), _SETTLE_S)

    await asyncio.gather(asyncio.to_thread(learner.leave_group), *(leave(engine) for engine in engines))


async def _answers(engine: EngineControl) -> bool:
    try:
        return await asyncio.wait_for(engine.healthy(), _SETTLE_S)
    except TimeoutError:
        return False


def _error(task: asyncio.Future[None]) -> BaseException | None:
    return None if task.cancelled() or not task.done() else task.exception()
