"""Calls in a session: each is run once and answered with its own result, whatever happens around it."""

import asyncio
import logging
import os
from collections.abc import Sequence

import pytest
from deadlines import run_ready_tasks, until
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Sandbox
from agentrl.testing import FakeSandboxBackend
from agentrl.toolserver import request_limits
from agentrl.toolserver.hosted_tool import StatelessTool, ToolSession
from agentrl.toolserver.server import session as session_module
from agentrl.toolserver.server.errors import Conflict
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions
from tests.unit.toolserver.fake_hosts import (
    FakeTool,
    Gate,
    echo,
    in_loop,
    in_sandbox,
    make_sessions,
)


async def say(sessions: Sessions, session: Session, call: ToolCall) -> ToolResult:
    return (await session.call(call)).result


@in_loop
async def test_a_retry_gets_the_first_result() -> None:
    tool = FakeTool(echo)
    sessions = make_sessions(tool)
    session = await sessions.open("e")
    first = await session.call(ToolCall("c", "fake", {"a": 1, "b": 2}))
    again = await session.call(ToolCall("c", "fake", {"b": 2, "a": 1}))
    assert again is first
    assert len(tool.calls) == 1


@in_loop
async def test_a_retry_waits_for_the_call_that_runs_even_if_the_first_caller_has_gone() -> None:
    gate = Gate()
    tool = FakeTool(gate)
    sessions = make_sessions(tool)
    session = await sessions.open()
    call = ToolCall("c", "fake", {})
    first = asyncio.create_task(say(sessions, session, call))
    await until(lambda: len(tool.calls) == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(say(sessions, session, call))
    await run_ready_tasks()
    assert not second.done()
    gate.open.set()
    assert (await second).content == "c {}"
    assert gate.cancelled == 0
    assert len(tool.calls) == 1


@pytest.mark.parametrize(
    "other_tool_call",
    [ToolCall("c", "fake", {"x": 2}), ToolCall("c", "other", {"x": 1}), ToolCall("c", "fake", {"x": True})],
)
@in_loop
async def test_an_id_that_was_another_call(other_tool_call: ToolCall) -> None:
    sessions = make_sessions(FakeTool(echo), FakeTool(echo, "other"))
    session = await sessions.open()
    await say(sessions, session, ToolCall("c", "fake", {"x": 1}))
    with pytest.raises(Conflict, match="'c' was another call"):
        await say(sessions, session, other_tool_call)


@in_loop
async def test_sessions_have_call_ids_of_their_own() -> None:
    sessions = make_sessions(FakeTool(echo))
    first_session, two = await sessions.open("1"), await sessions.open("2")
    assert (await say(sessions, first_session, ToolCall("c", "fake", {"x": 1}))).data == {"session": first_session.id}
    assert (await say(sessions, two, ToolCall("c", "fake", {"x": 2}))).data == {"session": two.id}


CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=24)
"""(session, call, whether the caller gives up)"""


@given(CALLS)
def test_whatever_the_order_each_call_runs_once_and_gets_its_own_answer(asked: Sequence[tuple[int, int, bool]]) -> None:
    async def check() -> None:
        tool = FakeTool(_slowly)
        sessions = make_sessions(tool)
        opened = [await sessions.open(str(number)) for number in range(4)]

        async def one(number: int, turn: int, gives_up: bool) -> None:
            task = asyncio.create_task(say(sessions, opened[number], ToolCall(f"c{turn}", "fake", {"turn": turn})))
            if gives_up:
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                return
            result = await task
            assert (result.call_id, result.content) == (f"c{turn}", f"c{turn} {{'turn': {turn}}}")
            assert result.data == {"session": opened[number].id}

        await asyncio.gather(*(one(*call_arguments) for call_arguments in asked))
        await sessions.stop()
        assert len(tool.calls) <= len({(number, turn) for number, turn, _ in asked})

    async def _slowly(session: ToolSession, call: ToolCall) -> ToolResult:
        for _ in range(call.arguments["turn"]):
            await asyncio.sleep(0)
        return await echo(session, call)

    asyncio.run(check())


@in_loop
async def test_what_is_no_such_tool_or_does_not_fit_never_reaches_a_tool() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = FakeTool(echo, schema=schema)
    sessions = make_sessions(tool)
    session = await sessions.open()
    unknown = await say(sessions, session, ToolCall("1", "fak", {}))
    assert (unknown.status, unknown.content) == (ToolStatus.INVALID, "there is no tool 'fak'; there are: fake")
    misfit = await say(sessions, session, ToolCall("2", "fake", {"n": "x"}))
    assert (misfit.status, misfit.content) == (ToolStatus.INVALID, "fake['n']: 'x' is not of type 'integer'")
    half = await say(sessions, session, ToolCall("3", "fake", {"n": 1, "s": "\ud800"}))
    assert half.status is ToolStatus.INVALID
    assert "surrogates" in half.content
    name = await say(sessions, session, ToolCall("5", "\udc00", {}))
    assert name.status is ToolStatus.INVALID
    assert not tool.calls
    huge = await say(sessions, session, ToolCall("4", "fake", {"n": 10**40}))
    assert huge.content == f"4 {{'n': {10**40}}}"


async def _no_result(session: ToolSession, call: ToolCall) -> ToolResult:
    return "a string"  # type: ignore[return-value]


async def _others_result(session: ToolSession, call: ToolCall) -> ToolResult:
    return ToolResult("another", ToolStatus.OK, "")


async def _no_json(session: ToolSession, call: ToolCall) -> ToolResult:
    return ToolResult(call.id, ToolStatus.OK, "", data=object())


async def _breaks(session: ToolSession, call: ToolCall) -> ToolResult:
    raise KeyError("a fault of \ud800 the tool's code")


async def _exits(session: ToolSession, call: ToolCall) -> ToolResult:
    raise SystemExit("no more, says Error: 3")


async def _gives_up(session: ToolSession, call: ToolCall) -> ToolResult:
    raise asyncio.CancelledError("Error: 4")


@pytest.mark.parametrize("work", [_no_result, _others_result, _no_json, _breaks, _exits, _gives_up])
@in_loop
async def test_a_tool_whose_code_is_at_fault_is_unavailable(work: object, caplog: pytest.LogCaptureFixture) -> None:
    sessions = make_sessions(FakeTool(work))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR):
        result = await say(sessions, await sessions.open(), ToolCall("c", "fake", {}))
    assert result.status is ToolStatus.UNAVAILABLE
    assert "Error: " in result.content
    assert caplog.records[0].exc_info is not None, "the log has the traceback"


@in_loop
async def test_a_schema_that_is_none_is_the_authors_fault() -> None:
    sessions = make_sessions(FakeTool(echo, schema={"type": "no such type"}))
    result = await say(sessions, await sessions.open(), ToolCall("c", "fake", {}))
    assert (result.status, "SchemaError" in result.content) == (ToolStatus.UNAVAILABLE, True)


@in_loop
async def test_a_call_that_does_not_end_when_it_is_cut_off_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = asyncio.Event()

    async def stubborn(session: ToolSession, call: ToolCall) -> ToolResult:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue
        return await echo(session, call)

    monkeypatch.setattr(session_module, "END_S", 0.02)
    sessions = make_sessions(FakeTool(stubborn), max_sessions=1)
    session = await sessions.open()
    call = asyncio.create_task(say(sessions, session, ToolCall("c", "fake", {})))
    await until(lambda: bool(session.running))
    await sessions.close(session.id)
    assert (await call).status is ToolStatus.UNAVAILABLE
    assert f"call-{session.id}-c does not end" in caplog.text
    await sessions.open()
    released.set()


@in_loop
async def test_failures_of_sandbox_and_tool_are_told_apart() -> None:
    async def sandbox_fails(session: ToolSession, call: ToolCall) -> ToolResult:
        raise SandboxFailure("the runner is gone")

    async def tool_fails(session: ToolSession, call: ToolCall) -> ToolResult:
        raise ToolFailure("its database is gone")

    sessions = make_sessions(FakeTool(sandbox_fails, "a"), FakeTool(tool_fails, "b"))
    session = await sessions.open()
    a, b = [await say(sessions, session, ToolCall(name, name, {})) for name in "ab"]
    assert (a.status, a.content) == (ToolStatus.SANDBOX_FAILURE, "the runner is gone")
    assert (b.status, b.content) == (ToolStatus.UNAVAILABLE, "its database is gone")
    figures = sessions.metrics.registry
    assert figures.get_sample_value("agentrl_sandbox_failures_total") == 1
    assert figures.get_sample_value("agentrl_tool_calls_total", {"tool": "b", "status": "unavailable"}) == 1


@in_loop
async def test_calls_to_the_sandbox_run_one_after_the_other_in_order_and_others_beside_them() -> None:
    backend, gate = FakeSandboxBackend(), Gate()
    sessions = make_sessions(FakeTool(in_sandbox, "python"), FakeTool(gate, "free"), backend=backend)
    session = await sessions.open()
    await say(sessions, session, ToolCall("0", "python", {}))
    (sandbox,) = backend.opened
    sandbox.gate.clear()
    slow = [
        asyncio.create_task(say(sessions, session, ToolCall(f"{n}", "python", {"code": str(n)}))) for n in (1, 2, 3)
    ]
    await until(lambda: len(sandbox.jobs) == 2)
    gate.open.set()
    assert (await say(sessions, session, ToolCall("free", "free", {}))).status is ToolStatus.OK
    assert [job.call_id for job in sandbox.jobs] == ["0", "1"]
    sandbox.gate.set()
    assert [(await task).content for task in slow] == ["1", "2", "3"]
    assert [job.call_id for job in sandbox.jobs] == ["0", "1", "2", "3"]


@in_loop
async def test_so_many_calls_run_code_at_once_and_no_more_and_others_do_not_wait() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox, "python"), FakeTool(echo), backend=backend, max_running=2)
    opened = [await sessions.open(str(number)) for number in range(5)]
    for session in opened:
        await say(sessions, session, ToolCall("warm", "python", {}))
    for sandbox in backend.opened:
        sandbox.gate.clear()
    calls = [
        asyncio.create_task(say(sessions, session, ToolCall("1", "python", {"code": session.id}))) for session in opened
    ]
    for done in range(5):
        await until(lambda: sum(sandbox.running for sandbox in backend.opened) == 2 if done < 4 else True)  # noqa: B023
        await run_ready_tasks()
        busy = [sandbox for sandbox in backend.opened if sandbox.running]
        assert len(busy) == min(2, 5 - done)
        assert (await say(sessions, opened[4], ToolCall(f"free{done}", "fake", {}))).status is ToolStatus.OK
        busy[0].gate.set()
        await until(lambda busy=busy: not busy[0].running)  # type: ignore[misc]
    assert [(await call).content for call in calls] == [session.id for session in opened]


@in_loop
async def test_calls_that_score_first_and_then_use_their_own_sandbox_do_not_lock_each_other_out() -> None:
    async def both_ways(session: ToolSession, call: ToolCall) -> ToolResult:
        if call.arguments["fresh_first"]:
            async with session.fresh_sandbox():
                await session.sandbox()
        else:
            await session.sandbox()
            async with session.fresh_sandbox():
                await asyncio.sleep(0)
        return ToolResult(call.id, ToolStatus.OK, "")

    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(both_ways), backend=backend, max_running=1)
    first_session, two = await sessions.open("1"), await sessions.open("2")
    calls = [
        say(sessions, session, ToolCall(str(number), "fake", {"fresh_first": number % 2 == 0}))
        for number in range(6)
        for session in (first_session, two)
    ]
    assert {result.status for result in await asyncio.gather(*calls)} == {ToolStatus.OK}
    assert len(backend.alive) == 2


@in_loop
async def test_few_sandboxes_are_made_at_once() -> None:
    class Counting(FakeSandboxBackend):
        now = most = 0

        async def open(self, session_id: str) -> Sandbox:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super().open(session_id)

    backend = Counting()
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend, max_running=1000)
    opened = [await sessions.open(str(number)) for number in range(100)]
    await asyncio.gather(*(say(sessions, session, ToolCall("1", "fake", {})) for session in opened))
    assert 1 < backend.most <= 2 * len(os.sched_getaffinity(0))
    assert len(backend.opened) == 100


@in_loop
async def test_a_call_that_fails_lets_the_next_one_have_the_sandbox() -> None:
    async def half_way(session: ToolSession, call: ToolCall) -> ToolResult:
        first, second = await asyncio.gather(session.sandbox(), session.sandbox())
        assert first is second
        raise ValueError("half way")

    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(half_way, "bad"), FakeTool(in_sandbox, "good"), backend=backend)
    session = await sessions.open()
    results = await asyncio.gather(
        *(say(sessions, session, ToolCall(name, name.strip("0"), {})) for name in ("bad", "good", "bad0", "good0"))
    )
    assert [result.status.value for result in results] == ["unavailable", "ok", "unavailable", "ok"]
    assert len(backend.opened) == 1


@in_loop
async def test_a_dead_sandbox_is_replaced_and_closed() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend)
    session = await sessions.open()
    await say(sessions, session, ToolCall("1", "fake", {}))
    backend.opened[0].broken = True
    assert (await say(sessions, session, ToolCall("2", "fake", {}))).status is ToolStatus.OK
    assert len(backend.opened) == 2
    assert backend.opened[0].closed
    assert sessions.metrics.registry.get_sample_value("agentrl_sandboxes_open") == 1


@in_loop
async def test_a_sandbox_that_does_not_open_fails_the_call_and_the_next_tries_again() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend)
    session = await sessions.open()
    backend.fault = SandboxFailure("no cgroup")
    assert (await say(sessions, session, ToolCall("1", "fake", {}))).status is ToolStatus.SANDBOX_FAILURE
    backend.fault = None
    assert (await say(sessions, session, ToolCall("2", "fake", {}))).status is ToolStatus.OK


@in_loop
async def test_a_fresh_sandbox_is_another_one_and_goes_with_its_block() -> None:
    async def score(session: ToolSession, call: ToolCall) -> ToolResult:
        own_sandbox = await session.sandbox()
        async with session.fresh_sandbox() as fresh_sandbox, session.fresh_sandbox() as two:
            assert len({own_sandbox.id, fresh_sandbox.id, two.id}) == 3
            assert len(backend.alive) == 3
            if call.arguments:
                raise ValueError("scoring broke")
        return ToolResult(call.id, ToolStatus.OK, "")

    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(score), backend=backend)
    session = await sessions.open()
    assert (await say(sessions, session, ToolCall("1", "fake", {}))).status is ToolStatus.OK
    assert len(backend.alive) == 1
    assert (await say(sessions, session, ToolCall("2", "fake", {"break": 1}))).status is ToolStatus.UNAVAILABLE
    assert len(backend.alive) == 1
    await sessions.close(session.id)
    assert not backend.alive


@in_loop
async def test_a_sandbox_at_a_server_that_has_none_is_the_authors_fault() -> None:
    sessions = make_sessions(FakeTool(in_sandbox))
    result = await say(sessions, await sessions.open(), ToolCall("1", "fake", {}))
    assert result.status is ToolStatus.UNAVAILABLE
    assert "needs_sandbox" in result.content


@in_loop
async def test_memory_of_results_is_bounded_and_a_forgotten_one_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def long(session: ToolSession, call: ToolCall) -> ToolResult:
        return ToolResult(call.id, ToolStatus.OK, "x" * 1000)

    monkeypatch.setattr(request_limits, "KEPT_BYTES", 3500)
    monkeypatch.setattr(request_limits, "KEPT_IDS", 10)
    tool = FakeTool(long)
    sessions = make_sessions(tool)
    session = await sessions.open()
    for number in range(8):
        await say(sessions, session, ToolCall(str(number), "fake", {}))
    for call_id in "567":
        assert (await say(sessions, session, ToolCall(call_id, "fake", {}))).content == "x" * 1000
    with pytest.raises(Conflict, match="no longer kept"):
        await say(sessions, session, ToolCall("4", "fake", {}))
    assert len(tool.calls) == 8
    for number in range(8, 30):
        await say(sessions, session, ToolCall(str(number), "fake", {}))
    assert sum(str(number) in session._calls for number in range(30)) == 10


@in_loop
async def test_closing_cuts_a_call_off_and_answers_it() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend)
    session = await sessions.open()
    await say(sessions, session, ToolCall("0", "fake", {}))
    backend.opened[0].gate.clear()
    running = [asyncio.create_task(say(sessions, session, ToolCall(name, "fake", {}))) for name in "ab"]
    await until(lambda: len(backend.opened[0].jobs) == 2)
    await asyncio.gather(sessions.close(session.id), sessions.close(session.id))
    for task in running:
        result = await task
        assert result.status is ToolStatus.UNAVAILABLE
        assert "closed by its client while the call ran" in result.content
    assert not backend.alive
    assert sessions.metrics.registry.get_sample_value("agentrl_sandboxes_open") == 0


@in_loop
async def test_a_sandbox_that_cannot_be_closed_keeps_nobody_from_closing(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(FakeSandboxBackend):
        async def open(self, session_id: str) -> Sandbox:
            sandbox = await super().open(session_id)

            async def close() -> None:
                raise OSError("device or resource busy")

            sandbox.close = close  # type: ignore[method-assign]
            return sandbox

    sessions = make_sessions(FakeTool(in_sandbox), backend=Stuck(), max_sessions=1)
    session = await sessions.open()
    await say(sessions, session, ToolCall("1", "fake", {}))
    await sessions.close(session.id)
    assert "could not be closed" in caplog.text
    await sessions.open()


@in_loop
async def test_each_tool_hears_of_the_end_and_one_that_hangs_or_breaks_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Ending(FakeTool):
        ended: tuple[str, ...] = ()

        async def end(self, session: ToolSession) -> None:
            self.ended += (session.id,)
            if self.spec.name == "breaks":
                raise ValueError("broken end")
            if self.spec.name == "hangs":
                await asyncio.Event().wait()

    monkeypatch.setattr(session_module, "END_S", 0.02)
    tools = [Ending(echo, name) for name in ("breaks", "hangs", "good")]
    sessions = make_sessions(*tools, max_sessions=1)
    session = await sessions.open()
    await asyncio.gather(sessions.close(session.id), sessions.close(session.id))
    assert [tool.ended for tool in tools] == [(session.id,)] * 3
    assert "broken end" in caplog.text
    assert "hangs could not end" in caplog.text
    await sessions.open()


class Reciprocal(StatelessTool):
    """1/n; 0 and what its type hints do not say break its code."""

    def __init__(self) -> None:
        super().__init__(
            Tool("reciprocal", "", {"type": "object", "properties": {"n": {"type": "integer"}}}), max_batch=8
        )
        self.batches: list[list[object]] = []

    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        self.batches.append([call.arguments["n"] for call in calls])
        return [ToolResult(call.id, ToolStatus.OK, str([1, 1 / call.arguments["n"]])) for call in calls]


@in_loop
async def test_an_error_of_one_call_of_a_batch_is_that_calls() -> None:
    tool = Reciprocal()
    session = await make_sessions(tool).open("e")
    calls = [ToolCall(str(number), "reciprocal", {"n": number}) for number in (1, 2.0, 0, 4, 5)]
    answers = await session.run_many(tool, calls)
    assert [answer.status for answer in answers] == [ToolStatus.OK] * 2 + [ToolStatus.UNAVAILABLE] + [ToolStatus.OK] * 2
    assert "ZeroDivisionError: division by zero (test_sessions_calls.py:" in answers[2].result.content
    assert repr(tool.batches[0]) == "[1, 2, 0, 4, 5]"  # 2.0 is an integer
    others = await asyncio.gather(*(tool.call(session, call) for call in calls), return_exceptions=True)
    assert [isinstance(result, ZeroDivisionError) for result in others] == [False, False, True, False, False]


class Short(Reciprocal):
    """Forgets the results of a batch but for the first."""

    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        return (await super().call_batch(calls))[:1]


@in_loop
async def test_a_batch_with_too_few_results_keeps_nobody_waiting() -> None:
    tool = Short()
    session = await make_sessions(tool).open("e")
    answers = await session.run_many(tool, [ToolCall(str(n), "reciprocal", {"n": n}) for n in (1, 2, 3)])
    assert [answer.status for answer in answers] == [ToolStatus.OK] * 3  # each alone has its result
