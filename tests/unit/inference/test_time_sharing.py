"""GPU time sharing of fleets: restarts of engines happen only in the turn of their fleet, and hold up nobody for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from agentrl.core.errors import EngineError
from agentrl.inference.fleet.time_sharing import POLICY, EngineTimeSharing
from agentrl.testing.virtual_time import run_virtual


class Memory:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    async def release(self) -> None:
        await asyncio.sleep(0.1)
        self.log.append(f"{self.name} sleeps")

    async def resume(self, tag: str) -> None:
        await asyncio.sleep(0.1)
        if tag == "kv_cache":
            self.log.append(f"{self.name} wakes")


class Engine:
    def __init__(self, log: list[str], name: str) -> None:
        self.memory = Memory(log, name)


class FakeFleet:
    """A fleet of one engine, which `restart` starts again."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.live: tuple[Any, ...] = ()
        self.has_requests = False
        self.context: AbstractAsyncContextManager[Any] | None = None
        self._demand: Callable[[], None] = lambda: None
        self.lost_for_good = False

    def on_demand(self, call: Callable[[], None]) -> None:
        self._demand = call

    def request(self, has_requests: bool) -> None:
        self.has_requests = has_requests
        self._demand()

    def restart_in(self, context: AbstractAsyncContextManager[None]) -> None:
        self.context = context

    async def start(self) -> None:
        self.log.append(f"{self.name} starts")
        self.live = (Engine(self.log, self.name),)

    async def check_now(self) -> None: ...

    async def wait_ended(self) -> None:
        if self.lost_for_good:
            raise EngineError(f"no engine of {self.name} is left")

    async def restart(self) -> None:
        self.live = ()
        assert self.context is not None
        async with self.context:
            self.log.append(f"{self.name} restarts")
            await asyncio.sleep(5)
            self.live = (Engine(self.log, self.name),)
            self.log.append(f"{self.name} is back")


class World:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.policy, self.judge = FakeFleet(self.log, "policy"), FakeFleet(self.log, "judge")
        self.sharing = EngineTimeSharing(self.policy, {"judge": self.judge})

    async def started(self) -> World:
        await self.sharing.start()
        return self

    async def after(self, seconds: float) -> list[str]:
        """What has happened in the meantime."""
        await asyncio.sleep(seconds)
        self.sharing.check()
        calls, self.log[:] = [*self.log], []
        return calls


async def begin() -> World:
    world = await World().started()
    assert await world.after(1) == ["policy starts", "policy sleeps", "judge starts", "judge sleeps"]
    world.sharing.add_episodes(2)
    assert await world.after(1) == ["policy wakes"]
    return world


def run(play: Callable[[World], Any]) -> None:
    async def main() -> None:
        world = await begin()
        await play(world)
        await world.sharing.aclose()

    run_virtual(main())


def test_a_judge_waits_for_all_episodes_and_the_policy_for_all_judgements() -> None:
    async def play(world: World) -> None:
        world.judge.request(True)
        world.sharing.add_episodes(-1)
        assert await world.after(1) == []
        world.sharing.add_episodes(-1)
        assert await world.after(1) == ["policy sleeps", "judge wakes"]
        world.sharing.add_episodes(3)
        assert await world.after(1) == [], "it is not done yet"
        world.judge.request(False)
        assert await world.after(1) == ["judge sleeps", "policy wakes"]

    run(play)


def test_a_policy_that_judges_too_wakes_for_its_requests() -> None:
    async def play(world: World) -> None:
        world.judge.request(True)
        world.policy.request(True)
        world.sharing.add_episodes(-2)
        assert await world.after(1) == []
        world.policy.request(False)
        assert await world.after(1) == ["policy sleeps", "judge wakes"]
        world.policy.request(True)
        world.judge.request(False)
        assert await world.after(1) == ["judge sleeps", "policy wakes"]

    run(play)


def test_an_engine_is_restarted_only_while_its_fleet_has_the_gpus() -> None:
    async def play(world: World) -> None:
        restarting = asyncio.ensure_future(world.judge.restart())
        assert await world.after(10) == [], "the policy has the GPUs"
        world.sharing.add_episodes(-2)
        world.judge.request(True)
        assert await world.after(1) == ["policy sleeps", "judge restarts"]
        world.judge.request(False)
        world.sharing.add_episodes(1)
        assert await world.after(10) == ["judge is back", "judge sleeps", "policy wakes"], "a restart is waited for"
        await restarting

    run(play)


def test_a_restart_that_needs_the_learner_does_not_hold_up_the_learner() -> None:
    """It is about to begin when the trainer has just got the learner: it waits, and the GPUs go to the learner and back."""

    async def play(world: World) -> None:
        learner = asyncio.Lock()
        world.policy.context = world.sharing.policy_restarts(learner)
        await learner.acquire()
        restarting = asyncio.ensure_future(world.policy.restart())
        assert await world.after(1) == []
        await world.sharing.give_to_learner()
        world.judge.request(True)
        assert await world.after(10) == [], "neither restarts nor judges have the GPUs while the learner has them"
        await world.sharing.return_from_learner()
        assert await world.after(1) == []
        learner.release()
        assert await world.after(1) == ["policy restarts"]
        world.sharing.add_episodes(-2)
        assert await world.after(10) == ["policy is back", "policy sleeps", "judge wakes"]
        assert not learner.locked()
        await restarting

    run(play)


def test_a_weight_sync_gets_the_policys_engines_awake() -> None:
    async def play(world: World) -> None:
        world.sharing.add_episodes(-2)
        world.judge.request(True)
        assert await world.after(1) == ["policy sleeps", "judge wakes"]
        world.judge.request(False)
        await world.sharing.give_to_policy()
        assert world.log == ["judge sleeps", "policy wakes"]
        await world.sharing.give_to_policy()
        assert await world.after(1) == ["judge sleeps", "policy wakes"]
        seconds = world.sharing.metrics()
        assert {*seconds} == {"time/judging_s", "time/judge_switch_s"}
        assert POLICY in world.sharing.fleets

    run(play)


def test_a_fleet_without_engines_ends_the_run() -> None:
    async def play(world: World) -> None:
        world.policy.lost_for_good = True
        world.sharing.add_episodes(-2)
        world.judge.request(True)
        with pytest.raises(EngineError, match="no engine of policy is left"):
            await world.after(1)

    run(play)
