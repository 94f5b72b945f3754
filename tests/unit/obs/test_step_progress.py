"""Lines about the start of a run, in output without a live view."""

from __future__ import annotations

import contextlib
import re

import pytest

from agentrl.obs.progress import StartTimes, covered_seconds
from agentrl.obs.waiting import PHASE, START, WaitRegistry, waiting


def test_what_starts_is_named_with_how_long_it_took_until_the_first_rollouts() -> None:
    lines: list[str] = []
    token = (waits := WaitRegistry([times := StartTimes(lines.append)])).enter()
    try:
        with waiting(PHASE, START):
            with waiting("start", "of the tool server search"), waiting("engine", "http://127.0.0.1:1", "/health"):
                pass
            with waiting("engine", "http://127.0.0.1:1", "/server_info"):
                pass
            with waiting("learner", lambda: "rank 0 of 1", "load"):
                pass
        with waiting(PHASE, "step 0", "weights"), waiting("engine", "0 of 1"):
            pass
        try:
            with waiting("start", "of an engine that fails"):
                raise OSError
        except OSError:
            pass
        for step in (1, 2):
            with waiting(PHASE, f"step {step}", "rollout"), waiting("start", "of a tool server, which has died"):
                pass
    finally:
        waits.leave(token)
    *part_lines, summary = lines
    assert [re.sub(r"\d+\.\d s$", "0.0 s", line) for line in part_lines] == [
        "start …",
        "start of the tool server search …",
        "start of the tool server search: 0.0 s",
        "learner rank 0 of 1, load …",
        "learner rank 0 of 1, load: 0.0 s",
        "start: 0.0 s",
        "step 0, weights …",
        "step 0, weights: 0.0 s",
        "start of an engine that fails …",
    ]
    shown = re.fullmatch(
        r"first rollouts ([\d.]+) s after the command began: preflight ([\d.]+), tools .*, sync .*", summary
    )
    assert shown is not None
    metrics = times.take_metrics()
    assert [f"{metrics[key]:.1f}" for key in ("time/start_s", "time/start_preflight_s")] == [shown[1], shown[2]]
    assert set(metrics) == {
        "time/start_s",
        *(f"time/start_{name}_s" for name in ("preflight", "tools", "learner", "sync")),
    }
    assert not times.take_metrics(), "they are of the first step alone"


def test_seconds_of_waits_that_overlap_count_once() -> None:
    assert covered_seconds([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.0)]) == 5.0
    assert covered_seconds([]) == 0.0


def test_a_part_takes_as_long_as_any_of_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    clock = iter([100.0, 101.0, 102.0, 105.0, 109.0, 110.0])  # start, two engines begin and end, the first rollout
    monkeypatch.setattr("agentrl.obs.waiting.monotonic", lambda: next(clock))
    token = (waits := WaitRegistry([times := StartTimes(lines.append, summary_only=True)])).enter()
    try:
        engines = [waiting("start", f"of engine-{number}") for number in range(2)]
        for engine in engines:
            engine.__enter__()
        for engine in engines:
            engine.__exit__(None, None, None)
        with contextlib.suppress(StopIteration), waiting(PHASE, "step 1", "rollout"):
            pass
    finally:
        waits.leave(token)
    assert times.take_metrics()["time/start_engines_s"] == 8.0
    assert len(lines) == 1, "with a live view"
