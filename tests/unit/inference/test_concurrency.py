"""The limit of requests in progress follows an engine's cache, and does not swing."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import ConfigError, EngineError
from agentrl.inference.client.control import EngineLoad, read_load
from agentrl.inference.fleet.concurrency import FIRST, MOST_PATIENCE, PATIENCE, ConcurrencyControl, ConcurrencyMonitor

LONG = 4000
"""Observations."""


class Engine:
    """Holds ``capacity`` requests at once; ``ends`` of those in progress end between two observations."""

    def __init__(self, capacity, ends):
        self.capacity = capacity
        self.ends = ends
        self.requests = 0

    def load(self, demand, limit):
        self.requests = max(min(demand, limit), self.requests - self.ends)
        running = min(self.requests, self.capacity)
        return EngineLoad(running, self.requests - running, running / self.capacity)


def observe(control, engine, demand, count=LONG):
    """Return the limits."""
    return [control.observe(engine.load(demand, control.limit)) for _ in range(count)]


def falls(limits):
    return sum(state_after < state_before for state_before, state_after in itertools.pairwise(limits))


capacities, ends = st.integers(1, 2000), st.integers(1, 200)


@given(capacity=capacities, ends=ends)
def test_a_constant_load_settles_below_the_capacity(capacity, ends):
    limits = observe(ConcurrencyControl(5000), Engine(capacity, ends), demand=10_000)
    late = limits[LONG // 2 :]
    assert falls(late) <= 1 + len(late) / MOST_PATIENCE * 2
    assert sum(limit > capacity for limit in late) / len(late) < 0.15
    assert max(late) <= 1.1 * capacity + 2
    assert sorted(late)[len(late) // 10] >= int(0.75 * capacity), "and near it"


@given(capacity=capacities, ends=ends, demand=st.integers(0, 3000), most=st.integers(1, 3000))
def test_bounds(capacity, ends, demand, most):
    limits = observe(ConcurrencyControl(most), Engine(capacity, ends), demand, 500)
    assert all(1 <= limit <= most for limit in limits)
    assert max(limits) <= max(FIRST, 1.25 * demand + 1), "a limit that no demand fills does not rise"


@given(before=st.integers(50, 2000), share=st.floats(0.1, 0.9), ends=st.integers(5, 200))
def test_it_follows_a_capacity_that_falls_and_rises_again(before, share, ends):
    control, engine = ConcurrencyControl(5000), Engine(before, ends)
    observe(control, engine, 10_000)
    engine.capacity = max(1, int(before * share))  # contexts have become longer
    assert observe(control, engine, 10_000, 1000)[-1] <= 1.1 * engine.capacity + 2
    engine.capacity = before
    assert observe(control, engine, 10_000, LONG)[-1] >= 0.7 * before


def test_retractions_count_although_the_cache_has_room():
    control = ConcurrencyControl(100)
    assert control.observe(EngineLoad(32, 0, 0.5, retracted=1)) == 28
    assert [control.observe(EngineLoad(28, 0, 0.5)) for _ in range(PATIENCE)] == [28] * (PATIENCE - 1) + [30]


def test_between_room_and_full_it_stays():
    control = ConcurrencyControl(100)
    assert {control.observe(EngineLoad(32, 0, 0.9)) for _ in range(100)} == {32}


def test_it_waits_for_requests_from_before_it_fell():
    control = ConcurrencyControl(100)
    control.observe(EngineLoad(20, 12, 1.0))
    assert {control.observe(EngineLoad(20, 10, 1.0)) for _ in range(5)} == {20}


def test_the_same_retractions_count_once():
    control = ConcurrencyControl(100)
    assert {control.observe(EngineLoad(20, 0, 0.5, retracted=3)) for _ in range(9)} == {20}


def test_requests_that_wait_for_the_next_batch_are_no_pressure():
    control = ConcurrencyControl(100)
    assert control.observe(EngineLoad(10, 22, 0.1)) == 32


def test_a_reply_of_sglang():
    rank = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "queues": {"retracted": 2}}
    assert read_load({"version": "0.5.23", "loads": [rank, rank | {"token_usage": 0.7}]}) == EngineLoad(6, 2, 0.7, 4)
    with pytest.raises(ValueError, match="num_running_reqs"):
        read_load({"loads": [{}]})


class Client:
    """An engine's client whose loads are given."""

    def __init__(self, *loads):
        self.loads = list(loads)
        self.ready = True
        self.control = self

    async def load(self):
        load_or_error = self.loads.pop(0)
        if isinstance(load_or_error, Exception):
            raise load_or_error
        return load_or_error


def test_each_engine_has_a_limit_and_one_that_is_paused_keeps_it():
    limits = {}
    engines = {"a": Client(EngineLoad(32, 0, 0.5), None), "b": Client(EngineLoad(20, 12, 1.0))}
    monitor = ConcurrencyMonitor(lambda: engines, limits.__setitem__)
    assert monitor.metrics() == {}

    async def observe():
        await monitor.observe()
        engines["b"].ready = False
        await monitor.observe()

    asyncio.run(observe())
    assert limits == {"a": 40, "b": 20}
    assert monitor.metrics() == {"rollout/max_running": 30.0}


def test_an_engine_without_a_load_is_refused():
    monitor = ConcurrencyMonitor(lambda: {"a": Client(EngineError("no load"))}, lambda name, limit: None)
    with pytest.raises(ConfigError, match=r"sampler\.max_running=auto: no load; set a number"):
        asyncio.run(monitor.start())
