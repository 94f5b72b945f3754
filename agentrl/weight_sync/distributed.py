"""Weight sync by broadcast in `torch.distributed` groups, each of a sender of the learner and the engines: NCCL or gloo."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed.base import WeightGroup
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup, WeightBucket
from agentrl.obs.waiting import waiting
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.bucketwise import BucketwiseSync
from agentrl.weight_sync.engines import begin_updates, call_all

_REFUSAL_S = 0.05
"""Wait before a broadcast: most engines that refuse a bucket answer within this time, and then nothing is broadcast. NCCL
sends a bucket in less time and aborts a broadcast at once, so it waits only in a group's first broadcast."""
_SETTLE_S = 5.0
"""Seconds for the other engines to notice a failure."""


_OVERLAPPED_BYTES = 64 * 2**20
"""A broadcast of more fits into no buffer of NCCL or gloo: its sender has sent it only when every engine has begun to receive
it. Then the next bucket may be announced, which no engine can take for this one."""


class _SilentError(EngineError):
    """An engine no longer answers."""


@dataclass(frozen=True, slots=True)
class _Announcement:
    """A bucket that was announced to an engine."""

    engine: int
    """Its number."""
    phase: str
    answer: asyncio.Future[None]
    """Done when the engine has loaded the bucket."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """The groups that a learner's senders and all engines have joined."""

    learner: LearnerGroup
    engines: tuple[EngineControl, ...]
    groups: dict[int, WeightGroup]
    """By the sender's rank."""

    def has(self, learner: LearnerGroup, engines: Sequence[EngineControl]) -> bool:
        """Return whether exactly these are its members."""
        return self.learner is learner and self.engines == tuple(engines)


class DistributedSync(BucketwiseSync):
    """The sender of a bucket, a rank of the learner, broadcasts it to all engines in its own group.

    Each bucket is announced to the engines first, so that a refusal blocks no other process. The next one is gathered and
    announced while engines load it. The groups are created at the first sync, kept for further syncs to the same engines,
    and created again after a failure.
    """

    default_bucket_mib = 4096
    tensor_ranks_only = True

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        self._joined: _Joined | None = None
        self._connected: set[WeightGroup] = set()
        """Groups in which a broadcast has succeeded."""
        self._loading: list[_Announcement] = []
        """Buckets that engines may still be loading."""

    @classmethod
    @override
    def faults(cls, config: Config) -> Iterator[str]:
        on_gpus = config.sampler.device == "cuda"
        if config.placement.shares_gpus and on_gpus:
            yield (
                "weights.transport=distributed: NCCL needs separate GPUs for the learner and each engine, and "
                "placement.mode=colocate shares them; set weights.transport=ipc"
            )
        elif on_gpus and config.learner.device == "cpu":
            yield (
                "weights.transport=distributed with learner.device=cpu: engines on GPUs receive weights from a GPU only; set "
                "weights.transport=tensor or disk"
            )
        else:
            yield from super().faults(config)

    @override
    async def aclose(self) -> None:
        """Let the learner and the engines leave the group."""
        loading, self._loading = self._loading, []
        for announcement in loading:
            announcement.answer.cancel()
        await asyncio.gather(*(announcement.answer for announcement in loading), return_exceptions=True)
        joined, self._joined = self._joined, None
        if joined is not None:
            self._connected.clear()
            await _leave(joined.learner, joined.engines, [*joined.groups.values()])

    async def _transfer(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, number: int
    ) -> None:
        phase = f"weights of version {version}, bucket {number}"
        reuses_group = self._joined is not None and self._joined.has(learner, engines)
        try:
            await self._broadcast(await self._group(learner, engines, bucket.sender), engines, bucket, version, phase)
        except EngineError as error:
            if number > 1 or not reuses_group or isinstance(error, _SilentError):
                raise
            # An engine that was restarted since the last sync is not in the group.
            await self.aclose()
            await begin_updates(engines, version)
            await self._broadcast(await self._group(learner, engines, bucket.sender), engines, bucket, version, phase)

    async def _broadcast(
        self, group: WeightGroup, engines: Sequence[EngineControl], bucket: WeightBucket, version: int, phase: str
    ) -> None:
        """Announce a bucket to all engines, then let rank 0 broadcast it.

        Returns while the engines load it, if another one follows.

        Raises:
            EngineError: names the engine and the bucket.
        """
        announced = [
            _Announcement(
                number,
                phase,
                asyncio.ensure_future(engine.updates.from_group(group, bucket.specs, version, last=bucket.last)),
            )
            for number, engine in enumerate(engines)
        ]
        self._loading += announced
        answers, broadcast = [announcement.answer for announcement in announced], None
        with waiting("engine", "broadcast", phase):
            wait_s = _REFUSAL_S if self.options.backend == "gloo" or group not in self._connected else 0.0
            early, _ = await asyncio.wait(answers, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if all(answer.exception() is None for answer in early):
                broadcast = asyncio.ensure_future(asyncio.to_thread(bucket.broadcast))
                overlaps = not bucket.last and total_bytes(*bucket.specs) > _OVERLAPPED_BYTES
                tasks = {broadcast, *(announcement.answer for announcement in self._loading)}
                awaited = tasks - set(answers if overlaps else ())
                if await _wait_for_success(tasks, awaited, self.options.timeout_s):
                    self._connected.add(group)
                    self._loading = announced if overlaps else []
                    return
            await self._blame(broadcast, engines, phase)

    async def _blame(
        self, broadcast: asyncio.Future[None] | None, engines: Sequence[EngineControl], phase: str
    ) -> None:
        """Raise the error of the engine that made a broadcast fail, or the learner's error."""
        loading, self._loading = self._loading, []
        failed = next(
            (
                announcement
                for announcement in loading
                if announcement.answer.done() and announcement.answer.exception()
            ),
            None,
        )
        learner_failed = broadcast is not None and (broadcast.done() or failed is None)
        # This ends the wait of engines for the broadcast.
        await self.aclose()
        tasks = [announcement.answer for announcement in loading] + ([broadcast] if broadcast else [])
        late = (await asyncio.wait(tasks, timeout=_SETTLE_S))[1]
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if broadcast and learner_failed and isinstance(error := _error(broadcast), LearnerError):
            raise error
        answers = await asyncio.gather(*(_answers(engine) for engine in engines))
        silent = [announcement for announcement in loading if not answers[announcement.engine]]
        hanging = [announcement for announcement in loading if announcement.answer in late]
        blamed = next(iter([*silent, *([failed] if failed else []), *hanging]), loading[-len(engines)])
        why = _error(blamed.answer) or f"it gave no answer within {self.options.timeout_s:g} s"
        kind, dead = (_SilentError, "it died or hangs: ") if silent else (EngineError, "")
        url = engines[blamed.engine].url
        raise kind(f"engine {blamed.engine} of {len(engines)} ({url}), {blamed.phase}: {dead}{why}")

    async def _group(self, learner: LearnerGroup, engines: Sequence[EngineControl], sender: int) -> WeightGroup:
        """Return the group of a sender and the engines; create it if they are not in it."""
        if self._joined is None or not self._joined.has(learner, engines):
            await self.aclose()
            self._joined = _Joined(learner, tuple(engines), {})
        groups = self._joined.groups
        if sender not in groups:
            groups[sender] = await self._create_group(learner, engines, sender)
        return groups[sender]

    async def _create_group(self, learner: LearnerGroup, engines: Sequence[EngineControl], sender: int) -> WeightGroup:
        sizes = dict(zip(engines, await asyncio.gather(*(engine.groups.ranks() for engine in engines)), strict=True))
        first, size = {}, 1
        for engine in engines:
            first[engine], size = size, size + sizes[engine]
        urls, options = [engine.url for engine in engines], self.options
        group = await asyncio.to_thread(learner.open_group, urls, size, options.backend, options.timeout_s, sender)
        ours = asyncio.ensure_future(asyncio.to_thread(learner.join_group, group, sender))
        try:
            await call_all(engines, "group of weights", lambda engine: engine.groups.join(group, first[engine]))
            await ours
        except BaseException:
            # Of the learner's groups, too: its senders leave together.
            joined, self._joined = self._joined, None
            await _leave(learner, engines, [group, *(joined.groups.values() if joined is not None else ())])
            await asyncio.gather(ours, return_exceptions=True)
            raise
        return group


async def _leave(learner: LearnerGroup, engines: Sequence[EngineControl], groups: Sequence[WeightGroup]) -> None:
    """Let all members leave groups concurrently: the wait of each side ends when the other leaves."""

    async def leave(engine: EngineControl) -> None:
        for group in groups:
            with contextlib.suppress(EngineError, TimeoutError):  # a dead engine has left it
                await asyncio.wait_for(engine.groups.leave(group), _SETTLE_S)

    await asyncio.gather(asyncio.to_thread(learner.leave_group), *(leave(engine) for engine in engines))


async def _wait_for_success(
    tasks: set[asyncio.Future[None]], awaited: set[asyncio.Future[None]], timeout_s: float
) -> bool:
    """Wait for the ``awaited`` ones of ``tasks``; return False as soon as one of ``tasks`` fails, or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pending = tasks
    while awaited & pending:
        remaining_s = deadline - time.monotonic()
        done, pending = await asyncio.wait(pending, timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
        if not done or any(task.exception() for task in done):
            return False
    return True


async def _answers(engine: EngineControl) -> bool:
    try:
        return await asyncio.wait_for(engine.healthy(), _SETTLE_S)
    except TimeoutError:
        return False


def _error(task: asyncio.Future[None]) -> BaseException | None:
    return None if task.cancelled() or not task.done() else task.exception()
