"""Opening, queueing, reaping and draining of sessions. Time is the test's own, but for tenths of seconds."""

import asyncio

import pytest
from deadlines import run_ready_tasks, until
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import ConfigError
from agentrl.core.types import ToolCall, ToolStatus
from agentrl.testing import FakeSandboxBackend
from agentrl.toolserver import request_limits
from agentrl.toolserver.server.errors import Draining, Full, SessionGone, UnknownSession
from tests.unit.toolserver.fake_hosts import (
    Clock,
    FakeTool,
    Gate,
    echo,
    in_loop,
    in_sandbox,
    make_sessions,
)


@in_loop
async def test_an_episode_has_one_session_and_the_nameless_have_their_own() -> None:
    sessions = make_sessions()
    assert await sessions.open("a") is await sessions.open("a")
    ids = {
        session.id
        for session in [
            await sessions.open("a"),
            await sessions.open("b"),
            await sessions.open(),
            await sessions.open(),
        ]
    }
    assert len(ids) == len(sessions) == 4
    first = await sessions.open("a")
    await sessions.close(first.id)
    assert await sessions.open("a") is not first


@in_loop
async def test_the_cap_holds_and_those_who_wait_come_in_order() -> None:
    sessions = make_sessions(max_sessions=2)
    open_sessions = [await sessions.open("a"), await sessions.open("b")]
    order: list[str] = []

    async def opener(name: str) -> None:
        open_sessions.append(await sessions.open(name))
        order.append(name)

    waiting = [asyncio.create_task(opener(name)) for name in "cdef"]
    await until(lambda: sessions.waiting == 4)
    assert await sessions.open("a") is open_sessions[0], "who has a session need not wait"
    while len(order) < 4:
        await sessions.close(open_sessions.pop(0).id)
        done = len(order) + 1
        await until(lambda done=done: len(order) == done)  # type: ignore[misc]
        assert len(sessions) == 2
    await asyncio.gather(*waiting)
    assert order == list("cdef")


@in_loop
async def test_room_is_free_only_once_the_sandbox_is_gone() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend, max_sessions=1)
    session = await sessions.open()
    await session.call(ToolCall("1", "fake", {}))
    released = asyncio.Event()

    async def slow_close() -> None:
        await released.wait()

    backend.opened[0].close = slow_close  # type: ignore[method-assign]
    closing = asyncio.create_task(sessions.close(session.id))
    waiting = asyncio.create_task(sessions.open())
    await run_ready_tasks()
    assert sessions.waiting == 1
    released.set()
    await asyncio.gather(closing, waiting)


@in_loop
async def test_waiting_ends_after_its_time() -> None:
    sessions = make_sessions(max_sessions=1, queue_timeout_s=0.02)
    await sessions.open("a")
    with pytest.raises(Full, match=r"all 1 sessions \(server.max_sessions\).*0.02 s"):
        await sessions.open("b")
    assert sessions.waiting == 0
    at_once = make_sessions(max_sessions=1, queue_timeout_s=0)
    await at_once.open("a")
    with pytest.raises(Full):
        await at_once.open("b")


@in_loop
async def test_two_requests_of_an_episode_wait_in_one_place() -> None:
    sessions = make_sessions(max_sessions=1)
    open_session = await sessions.open("a")
    first, second, other_opening = (asyncio.create_task(sessions.open(name)) for name in "bbc")
    await until(lambda: sessions.waiting == 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert sessions.waiting == 2, "the second request still wants it"
    await sessions.close(open_session.id)
    session = await second
    assert session.episode_id == "b"
    other_opening.cancel()
    await asyncio.gather(other_opening, return_exceptions=True)
    assert sessions.waiting == 0


@in_loop
async def test_who_gives_up_in_the_moment_of_its_turn_leaves_no_session_behind() -> None:
    sessions = make_sessions(max_sessions=1)
    open_session = await sessions.open("a")
    gives_up, next_one = (asyncio.create_task(sessions.open(name)) for name in "bc")
    await until(lambda: sessions.waiting == 2)
    await sessions.close(open_session.id)  # grants b its session
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    assert (await next_one).episode_id == "c"
    assert len(sessions) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "open", "close", "give_up", "reap"]), st.integers(0, 9)), max_size=40
)


@given(STEPS)
def test_never_more_than_the_cap_and_nobody_is_lost(steps: list[tuple[str, int]]) -> None:
    async def play() -> None:
        clock = Clock()
        sessions = make_sessions(max_sessions=3, clock=clock, idle_timeout_s=10)
        asking: list[asyncio.Task[object]] = []
        for action, number in steps:
            opened = list(sessions._open)
            if action == "open":
                asking.append(asyncio.create_task(sessions.open(f"e{number}")))
            elif action == "close" and opened:
                await sessions.close(opened[number % len(opened)])
            elif action == "give_up" and asking:
                asking[number % len(asking)].cancel()
            elif action == "reap":
                clock.now += number
                await sessions.reap()
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(sessions) <= 3
            assert sessions.waiting == 0 or len(sessions) + len(sessions._closing) == 3, "room and a queue"
        for _ in range(20):  # whoever waits gets in once the others have gone
            for session_name in list(sessions._open):
                await sessions.close(session_name)
            await asyncio.sleep(0)
        assert all(task.done() for task in asking)
        assert sessions.waiting == 0
        await asyncio.gather(*asking, return_exceptions=True)
        await sessions.stop()

    asyncio.run(play())


@in_loop
async def test_idle_sessions_are_reaped_and_busy_ones_are_not() -> None:
    clock, gate, backend = Clock(), Gate(), FakeSandboxBackend()
    sessions = make_sessions(
        FakeTool(gate, "slow"), FakeTool(in_sandbox, "python"), backend=backend, clock=clock, idle_timeout_s=100
    )
    idle, busy, late = [await sessions.open(name) for name in ("idle", "busy", "late")]
    await idle.call(ToolCall("1", "python", {}))
    running = asyncio.create_task(busy.call(ToolCall("1", "slow", {})))
    await until(lambda: bool(busy.running))
    clock.now += 60
    assert await sessions.reap() == 0
    await late.call(ToolCall("1", "python", {}))
    clock.now += 40
    assert await sessions.reap() == 1
    with pytest.raises(SessionGone, match="closed after 100 s without a call"):
        sessions.find(idle.id)
    assert [sandbox.id for sandbox in backend.alive] == [late.id]
    gate.open.set()
    await running
    await until(lambda: not busy.running)
    clock.now += 99
    assert await sessions.reap() == 1, "the late one; the busy one's time began when its call ended"
    clock.now += 1
    assert await sessions.reap() == 1
    assert sessions.metrics.registry.get_sample_value("agentrl_sessions_reaped_total") == 3
    assert len(sessions) == 0
    assert not backend.alive


@in_loop
async def test_the_server_reaps_by_itself() -> None:
    sessions = make_sessions(idle_timeout_s=0.02, max_sessions=1)
    sessions.start()
    session = await sessions.open()
    await sessions.open("waits for the first one's end")
    with pytest.raises(SessionGone):
        sessions.find(session.id)
    await sessions.stop()


@in_loop
async def test_what_is_gone_is_told_from_what_never_was_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "CLOSED_SESSIONS", 2)
    sessions = make_sessions()
    closed = [await sessions.open() for _ in range(3)]
    for session in closed:
        await sessions.close(session.id)
    await sessions.close(closed[2].id)
    with pytest.raises(SessionGone, match="closed by its client"):
        sessions.find(closed[1].id)
    with pytest.raises(UnknownSession):
        sessions.find(closed[0].id)
    with pytest.raises(UnknownSession):
        await sessions.close(closed[0].id)


@in_loop
async def test_draining_lets_calls_end_and_begins_nothing() -> None:
    gate, backend = Gate(), FakeSandboxBackend()
    sessions = make_sessions(FakeTool(gate), FakeTool(echo, "quick"), backend=backend, max_sessions=1)
    session = await sessions.open("a")
    running = asyncio.create_task(session.call(ToolCall("1", "fake", {})))
    waiting = asyncio.create_task(sessions.open("b"))
    await until(lambda: sessions.waiting == 1 and bool(session.running))
    draining = asyncio.create_task(sessions.drain(10))
    with pytest.raises(Draining):
        await waiting
    with pytest.raises(Draining):
        await sessions.open("c")
    with pytest.raises(Draining):
        await session.call(ToolCall("2", "quick", {}))
    again = asyncio.create_task(session.call(ToolCall("1", "fake", {})))
    await run_ready_tasks()
    assert not draining.done()
    gate.open.set()
    await draining
    assert (await running).result.status is ToolStatus.OK
    assert (await again) is (await running)
    await sessions.stop()
    assert len(sessions) == 0


@in_loop
async def test_what_does_not_end_in_time_is_cut_and_answered() -> None:
    gate = Gate()
    sessions = make_sessions(FakeTool(gate))
    session = await sessions.open("a")
    running = asyncio.create_task(session.call(ToolCall("1", "fake", {})))
    await until(lambda: bool(session.running))
    await sessions.drain(0.01)
    assert not running.done()
    await sessions.stop()
    assert (await running).result.status is ToolStatus.UNAVAILABLE
    assert gate.cancelled == 1
    with pytest.raises(SessionGone, match="the server stops"):
        sessions.find(session.id)


@in_loop
async def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two tools have one name"):
        make_sessions(FakeTool(echo), FakeTool(echo))
