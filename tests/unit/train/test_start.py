"""The start of a run's parts: they overlap with the warm start, and an error or a signal in any of them ends all."""

from __future__ import annotations

import asyncio
import errno
import io
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config.load import load_config
from agentrl.core.errors import AgentrlError, ConfigError, EngineError, RunStopped
from agentrl.obs.console import OutputClosedError, make_console
from agentrl.runtime.interrupt import Interrupt
from agentrl.train import start
from agentrl.train.rollout_source import RunInputs
from agentrl.train.run import NEW, _named_resume

PARTS = ("warm start", "ray", "services", "learner")


class World:
    """Fakes of the parts. Each logs when it begins, and ends when it may."""

    runner_cores = 0

    def __init__(self, failing: str = "", blocked: str = "", why_alone: str = "") -> None:
        self.events: list[str] = []
        self._failing, self._blocked = failing, blocked
        self._why_alone = why_alone
        self.is_blocked = asyncio.Event()
        self.services_started = asyncio.Event()
        self.services = Services(self)

    async def run(self, name: str) -> None:
        self.events.append(f"{name} begins")
        try:
            if name == self._blocked:
                self.is_blocked.set()
                await asyncio.Event().wait()
            if name == self._failing:
                raise EngineError(f"{name} failed")
        except asyncio.CancelledError:
            self.events.append(f"{name} cancelled")
            raise
        self.events.append(f"{name} ends")

    # The warm start

    base, model = Path("base"), Path("trained")

    def why_alone(self, _: Any) -> str:
        return self._why_alone

    async def train(self, _: Console) -> None:
        await self.run("warm start")
        if not self._why_alone:
            await self.services_started.wait()  # for ever, if they started only afterwards
            self.events.append("warm start done")

    # The cluster

    async def open(self) -> None:
        await self.run("ray")

    def load(self) -> None:
        self.events.append("load")

    async def learner(self) -> tuple[str, None]:
        await self.run("learner")
        return "learner", None

    def check(self) -> None: ...

    async def aclose(self) -> None:
        self.events.append("cluster closed")


class Services:
    def __init__(self, world: World) -> None:
        self.world = world
        self.check_learner: Any = None
        self.agents_line = ""

    def check(self) -> None:
        if self.world._failing == "engine, later":
            raise EngineError("engine, later failed")


class FakeSampling:
    def add_critic(self, critic: None) -> None: ...

    async def begin(self) -> None: ...


@asynccontextmanager
async def opening(
    monkeypatch: pytest.MonkeyPatch, world: World, *, warm: bool = True
) -> AsyncIterator[asyncio.Task[Any]]:
    """A task that opens the parts of a run, as `run_training` does."""

    async def start_services(run: RunInputs, _: Any, __: Any, exits: AsyncExitStack) -> tuple[Any, str]:
        assert run.shape == (Path("base") if run.warm_start else Path("trained")), "what is there already"
        await world.run("services")
        world.services_started.set()
        exits.callback(world.events.append, "services closed")
        return world.services, "bfloat16"

    async def open_teachers(*_: Any) -> None: ...

    async def open_sampling(*_: Any) -> Any:
        world.events.append("sampling")
        return FakeSampling()

    monkeypatch.setattr(start, "open_tasks", lambda _: {})
    monkeypatch.setattr(start, "RunCluster", lambda *_, **__: world)
    monkeypatch.setattr(start, "start_services", start_services)
    monkeypatch.setattr(start, "open_sampling", open_sampling)
    monkeypatch.setattr(start, "open_teachers", open_teachers)
    monkeypatch.setattr(start, "_open_evaluator", lambda *_: None)
    inputs: Any = RunInputs(
        load_config(None),
        Path("run"),
        Path("trained"),
        NEW,
        False,
        {},
        warm_start=world if warm else None,  # type: ignore[arg-type]
    )

    with Interrupt(print) as interrupt:

        async def open_all() -> None:
            async with AsyncExitStack() as exits, interrupt.guard():
                await start.open_parts(inputs, None, None, interrupt, exits, Console(file=io.StringIO()))

        task = asyncio.create_task(open_all())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def order(events: list[str], *expected: str) -> bool:
    """Whether ``expected`` are among the events, in this order."""
    remaining: Iterator[str] = iter(events)
    return all(event in remaining for event in expected)


def test_processes_start_while_the_warm_start_trains_and_weights_load_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        world = World()
        async with opening(monkeypatch, world) as task:
            await task
        return world.events

    log = asyncio.run(run())
    assert order(log, "services ends", "warm start done", "load", "sampling", "learner begins")
    assert order(log, "learner ends", "services closed", "cluster closed")


@pytest.mark.parametrize("warm", [False, True])
def test_without_room_or_without_a_warm_start_they_start_one_after_the_other(
    warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[str]:
        world = World(why_alone="there is no room")
        async with opening(monkeypatch, world, warm=warm) as task:
            await task
        return world.events

    expected = ["ray begins", "ray ends", "load", "services begins", "services ends", "sampling", "learner begins"]
    log = asyncio.run(run())
    assert log[:9] == ["warm start begins", "warm start ends", *expected] if warm else log[:7] == expected


@pytest.mark.parametrize("failing", [*PARTS, "engine, later"])
def test_an_error_of_one_ends_the_others(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        blocked = {"warm start": "services", "learner": "", "engine, later": "warm start"}.get(failing, "warm start")
        world = World(failing, blocked)
        async with opening(monkeypatch, world) as task:
            with pytest.raises(AgentrlError, match=f"{failing} failed"):
                await task
        return world.events

    log = asyncio.run(run())
    assert "cluster closed" in log
    assert sum(event.endswith("begins") for event in log) == sum(
        event.endswith(("ends", "cancelled")) for event in log
    ) + (failing in PARTS), "nothing goes on"


@pytest.mark.parametrize("blocked", PARTS)
def test_ctrl_c_ends_the_start_in_every_phase(blocked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        world = World(blocked=blocked)
        async with opening(monkeypatch, world) as task:
            await world.is_blocked.wait()
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(RunStopped, match="SIGINT"):
                await task
        return world.events

    log = asyncio.run(run())
    assert f"{blocked} cancelled" in log
    assert log[-1] == "cluster closed"


def test_a_second_ctrl_c_says_how_to_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(asyncio.CancelledError),
        _named_resume(tmp_path / "a run", None, None, Interrupt(print), make_console()),
    ):
        raise asyncio.CancelledError
    assert f"resume it with: agentrl train --resume 'run.dir={tmp_path}/a run'" in capsys.readouterr().out


def test_a_closed_output_says_how_to_resume(tmp_path: Path) -> None:
    with (
        pytest.raises(
            RunStopped, match=rf"standard output was closed, .*\n  agentrl train --resume run\.dir={tmp_path}"
        ),
        _named_resume(tmp_path, None, None, Interrupt(print), make_console()),
    ):
        raise OutputClosedError(errno.EPIPE, "Broken pipe")


def test_a_folder_that_is_removed_while_a_run_writes_to_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with (
        pytest.raises(ConfigError, match=rf"run\.dir={folder} was removed while the run wrote to it: .*metrics\.jsonl"),
        _named_resume(folder, None, None, Interrupt(print), make_console()),
    ):
        (folder / "metrics.jsonl").read_bytes()
