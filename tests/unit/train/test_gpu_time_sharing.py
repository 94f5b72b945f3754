"""GPU time sharing of learner and engines: the order of calls in every step, and engine restarts in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.load import load_config
from agentrl.core.errors import EngineError, LearnerError
from agentrl.core.types import RowKey
from agentrl.obs.progress import Stopwatch
from agentrl.runtime.interrupt import Interrupt
from agentrl.testing import FakeLearner
from agentrl.testing.virtual_time import run_virtual
from agentrl.train.engine_weights import EngineWeights, open_gpus
from agentrl.train.sampling import Sampling
from agentrl.weight_sync.base import SyncedWeights


class World:
    """Engines, a learner and a sync that log their calls in order."""

    def __init__(self, engines: int = 2) -> None:
        self.log: list[str] = []
        self.engines = [Engine(self, number) for number in range(engines)]
        self.lost: set[Engine] = set()
        self.launch_in: AbstractAsyncContextManager[Any] | None = None
        self.learner = Learner(self)
        self.weights = 1
        """Fingerprint of what is sent."""

    def metrics(self) -> dict[str, float]:
        return {}

    # The fleet

    @property
    def live(self) -> tuple[Engine, ...]:
        return tuple(engine for engine in self.engines if engine not in self.lost)

    async def check_now(self) -> None:
        self.lost |= {engine for engine in self.engines if engine.dead}

    async def wait_ended(self) -> None:
        self.log.append("ended")

    def set_weight_sync(
        self,
        sync_weights: Callable[[Any], Awaitable[int]],
        *,
        launch_in: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        self.sync_restarted, self.launch_in = sync_weights, launch_in

    # The sync

    async def sync_weights(self, learner: Any, engines: Any, version: int) -> SyncedWeights:
        assert learner is self.learner
        self.log.append(f"push {version} to {' '.join(engine.name for engine in engines)}")
        return SyncedWeights(self.weights, 3 << 20)

    async def aclose(self) -> None: ...

    def sampling(self, mode: str = "colocate", *settings: str, restart_sync: Any = None) -> Sampling:
        config = load_config(None, settings)
        config.placement.mode = mode  # type: ignore[assignment]
        services: Any = SimpleNamespace(fleet=self, time_sharing=None)
        records: Any = SimpleNamespace(journal=SimpleNamespace(batch=lambda step: None), metrics=dict)
        sync: Any = self
        tasks: Any = SimpleNamespace(buffer=SimpleNamespace(metrics=dict))
        fleet: Any = self
        weights = EngineWeights(config.weights, fleet, sync, open_gpus(config, fleet), restart_sync)
        return Sampling(config, services, tasks, weights, records, Interrupt(print))

    def said(self) -> list[str]:
        """What was written down since the last call."""
        calls, self.log = self.log, []
        return calls


class Engine:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"e{number}"
        self.dead = False
        self.refuses = ""
        self.memory = self

    async def _answer(self, call_name: str) -> None:
        await asyncio.sleep(0)
        if self.dead or self.refuses == call_name:
            raise EngineError(f"{self.name}: no {call_name}")
        self.world.log.append(f"{self.name} {call_name}")

    async def release(self, cut: str | None) -> None:
        assert cut is None
        await self._answer("release")

    async def resume(self, tag: str) -> None:
        await self._answer(tag)


class Learner(FakeLearner):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def wake(self) -> None:
        self.world.log.append("wake")

    def sleep(self) -> None:
        self.world.log.append("sleep")


class Check:
    """Takes the place of `agentrl.train.first_sync.FirstSyncCheck`."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def sample(self, engines: Any) -> None:
        self.world.log.append(f"check samples with {' '.join(engine.name for engine in engines)}")

    def score_learner(self, learner: Any) -> None:
        self.world.log.append("check scores")

    async def compare(self, learner: Any, engines: Any, version: int) -> dict[str, float]:
        self.world.log.append("check compares")
        return {"sync/gap": 0.1}


BACK = ["e0 weights", "e1 weights"]
KV = ["e0 kv_cache", "e1 kv_cache"]
RELEASE = ["e0 release", "e1 release", "ended", "wake"]


def test_the_first_check_scores_while_the_learner_has_the_gpus() -> None:
    """Engines lose their weights meanwhile, and get them again. Only the first sync is checked."""
    world = World()

    async def run() -> None:
        weights = world.sampling().weights
        weights.first_sync = Check(world)  # type: ignore[assignment]
        await weights.open()
        await weights.sync_weights(world.learner, 0, Stopwatch(), samples=True)
        to_engines = [*RELEASE, *BACK, "push 0 to e0 e1", "sleep", *KV]
        again = [*RELEASE, "check scores", *BACK, "push 0 to e0 e1", "sleep", *KV]
        assert world.said() == [*to_engines, "check samples with e0 e1", *again, "check compares"]
        await weights.sync_weights(world.learner, 1, Stopwatch(), samples=True)
        assert not [line for line in world.said() if "check" in line]
        assert weights.metrics["sync/gap"] == 0.1
        await weights.sync_weights(world.learner, 2, Stopwatch(), samples=True)
        assert "sync/gap" not in weights.metrics

    run_virtual(run())


def test_the_order_of_steps() -> None:
    """The learner is awake only while no engine holds a KV cache, and engines get weights before it sleeps."""
    world = World()

    async def run() -> None:
        source = world.sampling()
        await source.weights.open()
        watch = Stopwatch()
        await source.sync_weights(world.learner, 0, watch)
        assert world.said() == [*RELEASE, *BACK, "push 0 to e0 e1", "sleep", *KV]
        assert set(watch.metrics()) == {"time/wake_s", "time/sync_s", "time/sleep_s"}
        await source.release_gpus_for_training(world.learner, watch)
        assert world.said() == RELEASE
        await source.release_gpus_for_training(world.learner, watch)
        assert world.said() == [], "at a second optimizer step the GPUs are free"
        await source.sync_weights(world.learner, 1, watch)
        assert world.said() == [*BACK, "push 1 to e0 e1", "sleep", *KV]
        await source.sync_weights(world.learner, 2, watch)  # nothing was trained in this step
        assert world.said() == [*RELEASE, *BACK, "push 2 to e0 e1", "sleep", *KV]

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_a_critic_is_awake_only_while_no_engine_holds_memory(mode: str) -> None:
    class Critic(FakeLearner):
        def values(self, batch: GlobalBatch) -> dict[RowKey, Any]:
            return self.logprobs(batch)

        def wake(self) -> None:
            world.log.append("critic wakes")

        def sleep(self) -> None:
            world.log.append("critic sleeps")

    world = World()

    async def run() -> None:
        source = world.sampling(mode)
        await source.weights.open()
        source.add_critic(Critic())
        await source.release_gpus_for_training(world.learner, Stopwatch())
        assert world.said() == ([*RELEASE, "critic wakes"] if mode == "colocate" else [])
        await source.sync_weights(world.learner, 0, Stopwatch())
        pushed = ["push 0 to e0 e1"]
        assert world.said() == (["critic sleeps", *BACK, *pushed, "sleep", *KV] if mode == "colocate" else pushed)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["separate", "disaggregate"])
def test_without_shared_gpus_nothing_is_offloaded(mode: str) -> None:
    world = World()

    async def run() -> None:
        source = world.sampling(mode, "weights.sync_every=2")
        await source.weights.open()
        assert world.launch_in is None
        watch = Stopwatch()
        for version in range(4):
            await source.release_gpus_for_training(world.learner, watch)
            await source.sync_weights(world.learner, version, watch)
        assert world.said() == ["push 0 to e0 e1", "push 2 to e0 e1"]
        assert set(watch.metrics()) == {"time/sync_s"}

    asyncio.run(run())


def test_a_lost_engine_does_not_stop_the_others() -> None:
    """In each phase: its memory is waited for before the learner wakes, and the other one goes on."""
    for phase in ("release", "weights", "kv_cache"):
        world = World()

        async def run(world: World = world, phase: str = phase) -> None:
            source = world.sampling()
            await source.weights.open()
            watch = Stopwatch()
            await source.sync_weights(world.learner, 0, watch)
            world.said()
            lost = world.engines[0]
            if phase == "release":
                lost.dead = True
            await source.release_gpus_for_training(world.learner, watch)
            if phase == "weights":
                lost.dead = True
            whole = world.sync_weights

            async def sync_weights(learner: Any, engines: Any, version: int) -> SyncedWeights:
                sent = await whole(learner, engines, version)
                lost.dead = True
                return sent

            world.sync_weights = sync_weights  # type: ignore[method-assign]
            await source.sync_weights(world.learner, 1, watch)
            engines = "e0 e1" if phase == "kv_cache" else "e1"
            expected = ["e0 release"] * (phase != "release") + ["e1 release", "ended", "wake"]
            expected += ["e0 weights"] * (phase == "kv_cache") + ["e1 weights", f"push 1 to {engines}", "sleep"]
            assert world.said() == [*expected, "e1 kv_cache"]

        asyncio.run(run())


def test_all_engines_are_lost_while_the_learner_works() -> None:
    """The next episodes wait for a restarted engine, for which the learner releases its memory."""
    world = World()

    async def run() -> None:
        source = world.sampling()
        await source.weights.open()
        watch = Stopwatch()
        await source.sync_weights(world.learner, 0, watch)
        await source.release_gpus_for_training(world.learner, watch)
        world.said()
        world.lost = set(world.engines)
        await source.sync_weights(world.learner, 1, watch)
        assert world.said() == ["sleep"]

    asyncio.run(run())


@pytest.mark.parametrize("phase", ["release", "weights", "kv_cache"])
def test_an_engine_that_lives_and_refuses_ends_the_run(phase: str) -> None:
    world = World()

    async def run() -> None:
        source = world.sampling()
        await source.weights.open()
        world.engines[1].refuses = phase
        with pytest.raises(EngineError, match=f"e1: no {phase}"):
            await source.sync_weights(world.learner, 0, Stopwatch())
        assert ("wake" in world.log, "sleep" in world.log) == (phase != "release", phase == "kv_cache")

    asyncio.run(run())


def test_a_learner_without_enough_memory_ends_the_run() -> None:
    world = World()

    def wake() -> None:
        raise LearnerError("rank 0: out of memory")

    world.learner.wake = wake  # type: ignore[method-assign]

    async def run() -> None:
        source = world.sampling()
        await source.weights.open()
        with pytest.raises(LearnerError, match="out of memory"):
            await source.sync_weights(world.learner, 0, Stopwatch())

    asyncio.run(run())


def test_engines_are_restarted_only_while_episodes_run() -> None:
    """A restart needs the GPU: it waits until the engines have it, and the learner waits for the end of the restart."""
    world = World()
    other_world = World()

    async def restart() -> None:
        assert world.launch_in is not None
        async with world.launch_in:
            world.log.append("launch")
            await asyncio.sleep(0.05)
            assert await world.sync_restarted(world.engines[0]) == 3
            world.log.append("live")

    async def run() -> None:
        source = world.sampling(restart_sync=other_world)
        other_world.learner = world.learner
        await source.weights.open()
        watch = Stopwatch()
        await source.sync_weights(world.learner, 3, watch)
        world.said()
        restarting = asyncio.ensure_future(restart())
        await asyncio.sleep(0.05)
        assert world.said() == [], "the learner may be at work"
        async with source.weights.learner_idle():
            await asyncio.sleep(0.01)
            assert world.said() == ["launch"]
        assert world.said() == ["live"]
        assert other_world.said() == ["push 3 to e0"]
        await restarting

    run_virtual(run())


def test_a_sync_that_sends_what_the_one_before_sent_is_marked() -> None:
    world = World()

    async def run() -> None:
        source = world.sampling("separate")
        await source.weights.open()
        marks = []
        for version, weights in enumerate([5, 6, 6, 7]):
            world.weights = weights
            await source.sync_weights(world.learner, version, Stopwatch())
            assert source.metrics()["sync/mib"] == 3
            marks.append(source.metrics()["sync/unchanged"])
        assert marks == [0, 0, 1, 0]

    asyncio.run(run())
