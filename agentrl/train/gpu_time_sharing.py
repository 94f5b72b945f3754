"""The GPUs of learner and engines: separate, or shared in time (colocation), where the idle side has released its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar, Literal

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.obs.progress import Stopwatch


class SeparateGpus:
    """Learner and engines have separate GPUs, and keep their memory."""

    shared: ClassVar[bool] = False
    """Whether learner and engines use the same GPUs."""

    def __init__(self) -> None:
        self.critic: CriticGroup | None = None

    async def switch_to_learner(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Do nothing: the learner keeps its memory."""

    async def switch_to_engines(
        self, learner: LearnerGroup, sync: Callable[[], Awaitable[None]], watch: Stopwatch, *, due: bool
    ) -> None:
        """Sync the weights if that is ``due``; ``watch`` gets the seconds as ``sync``."""
        if due:
            with watch("sync"):
                await sync()


class GpuTimeSharing:
    """Switches the GPUs between learner and engines. Initially both may hold memory, or the learner may be offloaded."""

    shared: ClassVar[bool] = True

    def __init__(self, fleet: Fleet, cut: Literal["abort", "restart"] | None = None) -> None:
        """Share with the engines of ``fleet``, none of which may be restarted while the learner holds the GPUs.

        ``cut`` says what becomes of generations in progress when the learner gets the GPUs; see `EngineMemory.release`.
        """
        self._fleet = fleet
        self._cut = cut
        self._learner_active = False
        self.critic: CriticGroup | None = None
        """It holds GPU memory while the learner trains."""

    async def switch_to_learner(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Release the engines' memory and wake the learner; ``watch`` gets the seconds as ``wake``.

        Returns at once if the learner is active already.

        Raises:
            EngineError: a live engine keeps its memory.
            LearnerError: there is not enough memory for the learner, or a rank failed.
        """
        if self._learner_active:
            return
        with watch("wake"):
            await self.on_live(lambda engine: engine.memory.release(self._cut))
            await self._fleet.wait_ended()
            for group in (learner, self.critic):
                if group is not None:
                    await asyncio.to_thread(group.wake)
        self._learner_active = True

    async def switch_to_engines(
        self, learner: LearnerGroup, sync: Callable[[], Awaitable[None]], watch: Stopwatch, *, due: bool = True
    ) -> None:
        """Offload the critic, sync the weights while learner and engines both hold theirs, offload the learner, and restore
        KV caches.

        The weights are synced also if that is not ``due``: engines release theirs.

        ``watch`` gets the seconds of ``sync`` as ``sync`` and all others as ``sleep``.

        Raises:
            EngineError: a live engine does not restore its memory or does not take the weights.
            LearnerError: a rank failed.
        """
        await self.switch_to_learner(learner, watch)
        with watch("sleep"):
            if self.critic is not None:
                await asyncio.to_thread(self.critic.sleep)
            await self.on_live(lambda engine: engine.memory.resume("weights"))
        with watch("sync"):
            await sync()
        with watch("sleep"):
            await asyncio.to_thread(learner.sleep)
            await self.on_live(lambda engine: engine.memory.resume("kv_cache"))
        self._learner_active = False

    async def on_live(self, call: Callable[[EngineControl], Awaitable[None]]) -> None:
        """Call all live engines concurrently. Errors of engines that turn out to be lost are ignored.

        Raises:
            EngineError: of a live engine.
        """
        engines = self._fleet.live
        results = await asyncio.gather(*(call(engine) for engine in engines), return_exceptions=True)
        errors = {engine: result for engine, result in zip(engines, results, strict=True) if result is not None}
        if errors:
            await self._fleet.check_now()
        for engine, error in errors.items():
            if not isinstance(error, EngineError) or engine in self._fleet.live:
                raise error


def open_gpus(config: Config, fleet: Fleet) -> GpuTimeSharing | SeparateGpus:
    """Return how learner and engines of a run use GPUs."""
    if not config.placement.shares_gpus:
        return SeparateGpus()
    cut = config.weights.pause if config.asynchronous.max_staleness else None
    assert cut is None or cut in ("abort", "restart"), "check_placement comes first"
    return GpuTimeSharing(fleet, cut)
