"""Waits of a runner process, whose clock is another one, as the listeners of the run see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.obs import idle_time, remote_waits
from agentrl.obs import waiting as waits
from agentrl.obs.idle_time import IdleTime
from agentrl.obs.remote_waits import GROUP, RemoteWaits, WaitLog
from agentrl.obs.trace import EPISODES, RUN, TraceFiles, trace_files
from agentrl.obs.waiting import (
    PHASE,
    REQUEST,
    ROLLOUT,
    TURN,
    WaitListener,
    WaitRegistry,
    current_wait,
    waiting,
)

AHEAD_S = 7000.0
"""Of the runner's clock."""


class Clock:
    """Seconds, as the test advances them."""

    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (idle_time, waits, remote_waits):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


class Runner:
    """A runner process with one group, number 4."""

    def __init__(self, clock: Clock, kinds: tuple[str, ...] | None) -> None:
        self._clock, self._log = clock, WaitLog()
        self._log.kinds = kinds
        self._registry = WaitRegistry([self._log])

    @contextmanager
    def waiting(self, kind: str, *details: str) -> Iterator[None]:
        self._clock.seconds += AHEAD_S
        wait, outer = waiting(kind, *details), current_wait()
        token = self._registry.enter() if outer is None or outer.waits is not self._registry else None
        wait.__enter__()
        self._clock.seconds -= AHEAD_S
        try:
            yield
        finally:
            self._clock.seconds += AHEAD_S
            wait.__exit__(None, None, None)
            self._clock.seconds -= AHEAD_S
            if token is not None:
                self._registry.leave(token)

    def send(self, process: RemoteWaits, *, progress: bool = False) -> None:
        """Send what has happened, which arrives at once."""
        process.receive(self._clock.seconds + AHEAD_S, self._log.take(), progress=progress)


@contextmanager
def listening(*listeners: WaitListener) -> Iterator[WaitRegistry]:
    registry = WaitRegistry(listeners)
    token = registry.enter()
    yield registry
    registry.leave(token)


def test_they_count_when_they_happened_also_if_the_process_is_lost(clock: Clock) -> None:
    idle, runner = IdleTime(1, 4, delay_s=2.5), Runner(clock, (ROLLOUT, REQUEST))
    with listening(idle) as registry, waiting(PHASE, "step 1", "rollout"):
        process, phase = RemoteWaits(0, lambda number: phase if number == 4 else None), current_wait()
        clock.seconds += 1
        with runner.waiting(GROUP, "4"), runner.waiting(ROLLOUT, "e"):
            with runner.waiting(TURN, "1"), runner.waiting(REQUEST, "engine"):
                clock.seconds += 3
            clock.seconds += 1  # in a tool
            runner.send(process, progress=True)
            assert registry.last_progress == clock.seconds
            process.end_all("RunnerError")
        clock.seconds += 2.5
        metrics = idle.metrics()
    seconds = 2.5 + 1 + 3 + 1  # as counted: late by 2.5 s from the begin on
    assert metrics["engine_idle/total"] == pytest.approx((2.5 + 1 + 1) / seconds)
    assert metrics["engine_idle/tools"] == pytest.approx(1 / seconds)


def test_traces_have_them_nested_in_a_group_of_the_runner(clock: Clock, tmp_path: Path) -> None:
    files, runner = TraceFiles(tmp_path, step=1, keep=1, note=print), Runner(clock, None)
    with listening(files), waiting(PHASE, "step 1", "rollout"):
        process, phase = RemoteWaits(1, lambda _: phase), current_wait()
        with runner.waiting(GROUP, "4"):
            with runner.waiting(ROLLOUT, "first"), runner.waiting(TURN, "1"):
                clock.seconds += 2
            with runner.waiting(ROLLOUT, "second"):
                runner.send(process)
                clock.seconds += 1
                process.end_all("RunnerError")
    files.close()
    [path] = trace_files(tmp_path)
    events: list[dict[str, Any]] = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {RUN: "run", EPISODES: "episodes", EPISODES + 2: "episodes of runner 1"}
    spans = [
        (event["pid"], event["name"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"])
        for event in events
        if event["ph"] == "X"
    ]
    assert spans == [
        (EPISODES + 2, "turn", 100, 2, {"of": "1"}),
        (EPISODES + 2, "rollout", 100, 2, {"of": "first"}),
        (EPISODES + 2, "rollout", 102, 1, {"of": "second", "error": "RunnerError"}),
        (RUN, "rollout", 100, 3, {"of": "step 1, rollout"}),
    ]
