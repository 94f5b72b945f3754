"""Idle time by cause, on a clock that the test sets."""

import pytest

from agentrl.obs import idle_time
from agentrl.obs import waiting as waits
from agentrl.obs.idle_time import ENGINE_CAUSES, IdleTime
from agentrl.obs.waiting import PHASE, REQUEST, ROLLOUT, WaitRegistry, waiting


class Clock:
    """Seconds, as the test advances them."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(idle_time, "monotonic", clock)
    monkeypatch.setattr(waits, "monotonic", clock)
    return clock


class Run:
    """Waits that begin and end in any order; they are of a phase, or nested in the wait that is named."""

    def __init__(self, engines=1, slots=4):
        self.idle = IdleTime(engines, slots)
        self.registry = WaitRegistry([self.idle])
        self.open = {}

    def begin(self, name, kind, *details, inside=None):
        token = waits._inside.set(self.open[inside] if inside else self.registry)
        self.open[name] = waiting(kind, *details)
        self.open[name].__enter__()
        waits._inside.reset(token)

    def end(self, *names):
        for name in names:
            self.open.pop(name).__exit__(None, None, None)


def shares(metrics, prefix):
    value_by_name = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {key: pytest.approx(value) for key, value in value_by_name.items() if value}


def test_a_synchronous_step(clock):
    run = Run()
    run.begin("start", PHASE, "start")
    clock.now += 50  # is not counted
    run.end("start")
    run.begin("phase", PHASE, "step 1", "rollout")
    for name in "ab":
        run.begin(name, ROLLOUT, name, inside="phase")
        run.begin(f"{name}1", REQUEST, "e", inside=name)
    clock.now += 1  # both sample
    run.end("a1")
    clock.now += 1  # one waits for a tool
    run.end("b1")
    clock.now += 1  # both do
    run.end("a", "b")
    run.end("phase")
    run.begin("phase", PHASE, "step 1", "train")
    clock.now += 4
    run.end("phase")
    run.begin("phase", PHASE, "step 1", "weights")
    clock.now += 2
    run.end("phase")
    clock.now += 1
    metrics = run.idle.metrics()
    assert shares(metrics, "engine_idle/") == {
        "total": 0.8, "tools": 0.1, "learner": 0.4, "weight_sync": 0.2, "other": 0.1,
    }  # fmt: skip
    assert metrics["learner_idle/total"] == pytest.approx(0.6)
    assert shares(metrics, "slot_idle/") == {"tools": 3 / 12, "long_tail": 6 / 12}
    assert {f"engine_idle/{cause}" for cause in ENGINE_CAUSES} < {*metrics}


def test_an_engine_without_requests_while_others_have_some(clock):
    run = Run(engines=2)
    run.begin("phase", PHASE, "step 1", "rollout")
    run.begin("a", ROLLOUT, "a", inside="phase")
    run.begin("a1", REQUEST, "e0", inside="a")
    clock.now += 3
    run.begin("b", ROLLOUT, "b", inside="phase")
    clock.now += 1
    assert shares(run.idle.metrics(), "engine_idle/") == {"total": 0.5, "long_tail": 3 / 8, "tools": 1 / 8}


def test_an_evaluation(clock):
    run = Run()
    run.begin("phase", PHASE, "step 1", "evaluation")
    run.begin("a", ROLLOUT, "a", inside="phase")
    run.begin("a1", REQUEST, "e", inside="a")
    clock.now += 3
    run.end("a1")
    clock.now += 1
    metrics = run.idle.metrics()
    assert shares(metrics, "engine_idle/") == {"total": 0.25, "evaluation": 0.25}
    assert not shares(metrics, "slot_idle/")
    assert metrics["learner_idle/total"] == 1


def test_learner_and_episodes_at_the_same_time(clock):
    run = Run()
    run.begin("sampling", PHASE, "step 2", "rollout")
    run.begin("train", PHASE, "step 1", "train")
    run.begin("a", ROLLOUT, "a", inside="sampling")
    run.begin("a1", REQUEST, "e", inside="a")
    clock.now += 1
    run.end("a1")
    clock.now += 1
    run.end("a")
    clock.now += 2
    metrics = run.idle.metrics()
    assert shares(metrics, "engine_idle/") == {"total": 0.75, "tools": 0.25, "learner": 0.5}
    assert metrics["learner_idle/total"] == 0
    clock.now += 1
    assert run.idle.metrics()["engine_idle/learner"] == 1, "each call begins a new window"


def test_requests_to_a_queue_are_not_idle_slots(clock):
    run = Run(slots=1)
    run.begin("phase", PHASE, "step 1", "rollout")
    for name in "ab":
        run.begin(name, ROLLOUT, name, inside="phase")
    run.begin("a1", REQUEST, "e", inside="a")
    clock.now += 1
    metrics = run.idle.metrics()
    assert metrics["slot_idle/tools"] == metrics["slot_idle/long_tail"] == 0
    assert metrics["engine_idle/total"] == 0
