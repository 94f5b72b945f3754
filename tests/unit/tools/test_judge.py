"""Verdicts, and what enters a sandbox and what does not. Real programs run without a sandbox here, in processes of ours."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from agentrl_tools.judge import JudgeOptions, JudgeService, JudgeTool, Rule, Verdict, judge_outcome

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError, SandboxFailure
from agentrl.core.registry import tool_service
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job, Outcome, Sandbox
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend
from agentrl.testing import FakeSandbox
from agentrl.toolserver.hosted_tool import ToolSession

SECRET = "expected-and-nobody-else's-business"
Answer = Callable[[Job], Outcome]


def outcome(stdout: str = "", status: ToolStatus = ToolStatus.OK) -> Outcome:
    return Outcome(status, stdout, "", 0 if status is ToolStatus.OK else None, 0.01)


class JudgedSandbox(FakeSandbox):
    """Looks the same to the judge until ``traces`` says otherwise; the judge needs no files."""

    def __init__(self, number: int, answer: Answer) -> None:
        super().__init__(f"fake-{number}", self._look_or_answer)
        self.traces, self.first_process = "nothing", 2
        self._answer_test = answer

    def _look_or_answer(self, job: Job) -> Outcome:
        looks = job.call_id.startswith("look")
        return outcome(repr((self.traces, [self.first_process + len(self.jobs)]))) if looks else self._answer_test(job)

    async def write_file(self, path: str, content: bytes) -> None:
        raise AssertionError("the judge writes no files")

    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        raise AssertionError("the judge reads no files")


class FakeSession(ToolSession):
    """Keeps what it opened; the episode's own sandbox is out of bounds."""

    def __init__(self, answer: Answer) -> None:
        self.id = "fake"
        self.state: dict[str, Any] = {}
        self.opened: list[JudgedSandbox] = []
        self._answer = answer

    async def sandbox(self) -> Sandbox:
        raise AssertionError("the episode's sandbox is not asked for")

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        self.opened.append(JudgedSandbox(len(self.opened), self._answer))
        try:
            yield self.opened[-1]
        finally:
            await self.opened[-1].close()


def judge(
    answer: Answer,
    tests: int = 3,
    *,
    session: FakeSession | None = None,
    options: JudgeOptions | None = None,
    **more: Any,
) -> tuple[ToolResult, FakeSession]:
    session = session or FakeSession(answer)
    tool = JudgeTool(options)
    arguments = {
        "program": "print(input())",
        "inputs": [f"{n}\n" for n in range(tests)],
        "outputs": [f"{SECRET} {n}\n" for n in range(tests)],
        **more,
    }
    assert not tool.spec.schema_fault(arguments)
    return asyncio.run(tool.call(session, ToolCall("c", "judge", arguments))), session


def right(job: Job) -> Outcome:
    return outcome(f"{SECRET} {job.stdin.decode()}")


@pytest.mark.parametrize(
    ("printed", "expected", "rule", "fits"),
    [
        ("1 2\n3", " 1  2 3\n\n", Rule(), True),
        ("1 2", "1 2 3", Rule(), False),
        ("1 2 3", "1 2", Rule(), False),
        ("", "\n", Rule(), True),
        ("Yes", "yes", Rule(), False),
        ("1.0", "1", Rule(), False),
        ("1.0", "1", Rule(tolerance=0), True),
        ("0.3333333", "0.33333333333", Rule(tolerance=1e-6), True),
        ("0.3334", "0.33333333333", Rule(tolerance=1e-6), False),
        ("1000000.5", "1000000", Rule(tolerance=1e-6), True),
        ("1000002", "1000000", Rule(tolerance=1e-6), False),
        ("1e3", "1000", Rule(tolerance=1e-9), True),
        ("nan", "1", Rule(tolerance=1e9), False),
        ("inf", "1", Rule(tolerance=1e9), False),
        ("1e999", "1", Rule(tolerance=1e9), False),
        ("1e999", "1e998", Rule(tolerance=1.0), False),
        ("1_0", "10", Rule(tolerance=1e-6), False),
        ("9" * 100000, "1", Rule(tolerance=1e-6), False),
        ("no", "1", Rule(tolerance=1e9), False),
        ("٣", "3", Rule(tolerance=1e-6), False),
        ("1e٣", "1000", Rule(tolerance=1e-6), False),
        ("3.٠", "3", Rule(tolerance=1e-6), False),
        ("1 2\n3  \n\n", "1 2\n3\n", Rule("lines"), True),
        ("1  2\n3\n", "1 2\n3\n", Rule("lines"), False),
        (" 1 2\n3\n", "1 2\n3\n", Rule("lines"), False),
        ("1 2\n\n3\n", "1 2\n3\n", Rule("lines"), False),
    ],
)
def test_output_is_compared(printed: str, expected: str, rule: Rule, fits: bool) -> None:
    assert rule.fits(printed, expected) is fits


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        (ToolStatus.OK, Verdict.ACCEPTED),
        (ToolStatus.ERROR, Verdict.RUNTIME_ERROR),
        (ToolStatus.KILLED, Verdict.RUNTIME_ERROR),
        (ToolStatus.TIMEOUT, Verdict.TIME_LIMIT),
        (ToolStatus.OUT_OF_MEMORY, Verdict.MEMORY_LIMIT),
        (ToolStatus.OUTPUT_CUT, Verdict.OUTPUT_LIMIT),
    ],
)
def test_right_output_counts_only_after_a_good_end(status: ToolStatus, verdict: Verdict) -> None:
    assert judge_outcome(outcome("6\n", status), "6", Rule()) is verdict
    if status is ToolStatus.OK:
        assert judge_outcome(outcome("7\n", status), "6", Rule()) is Verdict.WRONG_ANSWER


def test_what_is_expected_enters_no_sandbox() -> None:
    result, session = judge(right, options=JudgeOptions(time_s=3, wall_s=7.5, output_kb=2))
    assert result.data == {"verdicts": ["accepted"] * 3}
    assert result.content == "3 of 3 tests passed"
    [sandbox] = session.opened
    assert sandbox.closed
    tests = [job for job in sandbox.jobs if job.call_id.startswith("test")]
    assert [job.stdin for job in tests] == [b"0\n", b"1\n", b"2\n"]
    assert {(job.code, job.wall_s, job.cpu_s, job.output_bytes, job.stateful) for job in tests} == {
        ("print(input())", 7.5, 3, 2048, False)
    }
    assert SECRET not in repr(sandbox.jobs)


def test_a_trace_of_an_earlier_test_costs_a_new_sandbox() -> None:
    session = FakeSession(lambda job: _marks(session, job))
    result, _ = judge(right, 4, session=session)
    assert result.data == {"verdicts": ["accepted"] * 4}
    runs = [[job.call_id for job in sandbox.jobs if job.call_id.startswith("test")] for sandbox in session.opened]
    assert runs == [["test-0", "test-1"], ["test-2", "test-3"]], "test-1 left a trace"
    assert all(sandbox.closed for sandbox in session.opened)


def test_a_test_that_started_a_process_costs_a_new_sandbox() -> None:
    def starts_one(job: Job) -> Outcome:
        session.opened[-1].first_process += job.call_id == "test-0"
        return right(job)

    session = FakeSession(starts_one)
    judge(starts_one, 3, session=session)
    assert len(session.opened) == 2


def _marks(session: FakeSession, job: Job) -> Outcome:
    if job.call_id == "test-1":
        session.opened[-1].traces = "a file"
    return right(job)


def test_a_sandbox_that_died_is_replaced() -> None:
    def dies(job: Job) -> Outcome:
        session.opened[-1].broken = job.call_id == "test-0"
        return outcome(status=ToolStatus.OUT_OF_MEMORY) if job.call_id == "test-0" else right(job)

    session = FakeSession(dies)
    result, _ = judge(dies, session=session)
    assert result.data == {"verdicts": ["memory_limit", "accepted", "accepted"]}
    assert len(session.opened) == 2


def test_one_failure_may_be_enough() -> None:
    result, session = judge(lambda job: outcome("1" if job.stdin == b"1\n" else SECRET + " 0"), stop_early=True)
    assert result.data == {"verdicts": ["accepted", "wrong_answer", "not_run"]}
    assert result.content == "1 of 3 tests passed"
    assert "test-2" not in [job.call_id for job in session.opened[0].jobs]


def test_a_failing_sandbox_is_no_verdict() -> None:
    def breaks(job: Job) -> Outcome:
        if job.stdin == b"1\n":
            raise SandboxFailure("the runner is gone")
        return right(job)

    session = FakeSession(breaks)
    with pytest.raises(SandboxFailure, match="the runner is gone"):
        judge(breaks, session=session)
    assert all(sandbox.closed for sandbox in session.opened)


def test_so_many_programs_at_once() -> None:
    tool, running, most = JudgeTool(JudgeOptions(at_once=2)), 0, 0

    class Slow(JudgedSandbox):
        async def run(self, job: Job) -> Outcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return await super().run(job)

    class Session(FakeSession):
        @asynccontextmanager
        async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
            yield Slow(0, right)

    async def all_of_them() -> Sequence[ToolResult]:
        arguments = {"program": "p", "inputs": ["0"], "outputs": [f"{SECRET} 0"]}
        calls = [tool.call(Session(right), ToolCall(f"c{n}", "judge", arguments)) for n in range(6)]
        return await asyncio.gather(*calls)

    assert {result.content for result in asyncio.run(all_of_them())} == {"1 of 1 tests passed"}
    assert most == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"outputs": ["1"]}, "3 inputs and 1 outputs"),
        ({"program": "print('\ud800')"}, "is not a Unicode character"),
    ],
)
def test_calls_that_cannot_be_judged(more: dict[str, Any], message: str) -> None:
    result, session = judge(right, **more)
    assert result.status is ToolStatus.INVALID
    assert message in result.content
    assert not session.opened


def test_no_policy_is_offered_the_judge() -> None:
    service = tool_service("judge")
    assert isinstance(service, JudgeService)
    assert service.tools({}) == ()
    assert service.sandboxed
    [tool] = service.create_tools(JudgeOptions())
    assert tool.spec.name == "judge"
    with pytest.raises(ConfigError, match=r"tools\.judge\.options\.time"):
        service.launch_arguments({"time": 3}, None, None)  # type: ignore[arg-type]


PROGRAMS = {
    "print(2 * int(input()))": "accepted",
    "print(input())": "wrong_answer",
    "print(2 * int(input())); raise SystemExit(1)": "runtime_error",
    "1/0": "runtime_error",
    "print(": "runtime_error",
    "\0": "runtime_error",
    "import os; os.kill(os.getpid(), 11)": "runtime_error",
    "while True: pass": "time_limit",
    "import time; time.sleep(60)": "time_limit",
    "while True: print('x' * 1000)": "output_limit",
    "import sys\nfor line in sys.stdin: print(2 * int(line))": "accepted",
    "def main():\n    print(2 * int(open(0).read()))\nif __name__ == '__main__':\n    main()": "accepted",
    "import sys; sys.stdout.buffer.write(b'\\xff')": "wrong_answer",
}


def test_real_programs_without_a_sandbox() -> None:
    class Session(ToolSession):
        def __init__(self, backend: UnsafeBackend) -> None:
            self.id, self.state, self.backend = "s", {}, backend

        async def sandbox(self) -> Sandbox:
            raise AssertionError("the episode's sandbox is not asked for")

        @asynccontextmanager
        async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
            async with await self.backend.open("fresh") as sandbox:
                yield sandbox

    async def run() -> list[str]:
        tool = JudgeTool(JudgeOptions(time_s=1, wall_s=1.5, output_kb=64))
        async with UnsafeBackend(SandboxConfig(backend="unsafe_subprocess")) as backend:

            async def one(program: str) -> str:
                call = ToolCall("c", "judge", {"program": program, "inputs": ["21\n"], "outputs": ["42\n"]})
                [verdict] = (await tool.call(Session(backend), call)).data["verdicts"]
                return str(verdict)

            return list(await asyncio.gather(*(one(program) for program in PROGRAMS)))

    assert dict(zip(PROGRAMS, asyncio.run(run()), strict=True)) == PROGRAMS
