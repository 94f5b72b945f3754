import asyncio
import json

import pytest

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job, Outcome
from agentrl.testing import FakeSandbox
from agentrl.toolserver.sandbox_tool import REPLACED, SandboxTool, as_result, cut_middle
from tests.unit.toolserver.tool_sessions import LoneSession

CALL = ToolCall("c1", "python", {})


def content(status: ToolStatus, out: str = "", err: str = "", code: int | None = 0, detail: str = "") -> str:
    return as_result(CALL, Outcome(status, out, err, code, 0.1, detail), 1000).content


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (content(ToolStatus.OK, "1\n2\n"), "1\n2"),
        (content(ToolStatus.OK), "[no output]"),
        (content(ToolStatus.OK, "\n\n"), "[no output]"),
        (content(ToolStatus.OK, "a", "b\n"), "a\nb"),
        (content(ToolStatus.OK, "", "b\n"), "b"),
        (content(ToolStatus.OK, "  a\n"), "  a"),
        (content(ToolStatus.ERROR, "a\n", "Traceback", 1), "a\nTraceback\n[exit status 1]"),
        (content(ToolStatus.ERROR, code=3), "[exit status 3]"),
        (
            content(ToolStatus.ERROR, code=4, detail="the process ended, variables are lost"),
            "[exit status 4]\n[the process ended, variables are lost]",
        ),
        (content(ToolStatus.TIMEOUT, "a\n", code=None, detail="timed out after 10 s"), "a\n[timed out after 10 s]"),
        (content(ToolStatus.OUT_OF_MEMORY, code=None, detail="out of memory"), "[out of memory]"),
        (content(ToolStatus.KILLED, code=-11, detail="killed by SIGSEGV"), "[killed by SIGSEGV]"),
    ],
)
def test_a_policy_reads_what_was_printed_and_what_ended_it(got: str, expected: str) -> None:
    assert got == expected


def test_data_are_everything_and_json() -> None:
    long = "x" * 5000
    result = as_result(CALL, Outcome(ToolStatus.ERROR, long, "e", 2, 0.25, "d"), 100)
    assert json.loads(json.dumps(result.data)) == {
        "stdout": long,
        "stderr": "e",
        "exit_code": 2,
        "seconds": 0.25,
        "detail": "d",
    }
    assert result.call_id == "c1"
    assert result.status is ToolStatus.ERROR


@pytest.mark.parametrize("size", [100, 101])
def test_the_middle_of_long_text_is_left_out_and_counted(size: int) -> None:
    text = "".join(chr(0x4E00 + i) for i in range(1000))
    cut = cut_middle(text, size)
    head, note, tail = cut.split("\n")
    assert note == f"[… {1000 - size} characters left out …]"
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == size
    assert cut_middle(text[:size], size) == text[:size]


def test_the_end_of_a_long_output_is_told_whatever_is_cut() -> None:
    outcome = Outcome(ToolStatus.OUTPUT_CUT, "x" * 10_000, "", None, 1.0, "ended after printing 10000 bytes")
    assert as_result(CALL, outcome, 100).content.endswith("\n[ended after printing 10000 bytes]")


def named_sandbox(name: str) -> FakeSandbox:
    """A sandbox that prints its name, until it runs the code ``die``."""

    def answer(job: Job) -> Outcome:
        sandbox.broken = job.code == "die"
        if sandbox.broken:
            return Outcome(ToolStatus.OUT_OF_MEMORY, "", "", None, 0.0, "out of memory; the sandbox was ended")
        return Outcome(ToolStatus.OK, f"{name}\n", "", 0, 0.0)

    sandbox = FakeSandbox(name, answer)
    return sandbox


def lone() -> LoneSession:
    return LoneSession(lambda number: named_sandbox(f"box{number}"))


class OneJob(SandboxTool):
    """Runs the same job at every call."""

    def __init__(self, job: Job) -> None:
        super().__init__(Tool("python", "", {}), max_chars=100)
        self._job = job

    def job(self, call: ToolCall) -> Job:
        return self._job


def runs(session: LoneSession, *jobs: Job) -> list[ToolResult]:
    async def run() -> list[ToolResult]:
        return [await OneJob(job).call(session, CALL) for job in jobs]

    return asyncio.run(run())


def test_a_policy_is_told_once_that_its_files_are_lost() -> None:
    session = lone()
    job = Job("c", code="x")
    outcomes = runs(session, job, job)
    asyncio.run(session.opened[0].close())
    outcomes += runs(session, job, job)
    assert [result.content for result in outcomes] == ["box0", "box0", f"{REPLACED}\nbox1", "box1"]


def test_it_is_not_told_twice_where_the_outcome_said_so() -> None:
    ended, runs_after = runs(lone(), Job("c", code="die"), Job("c", code="x"))
    assert ended.content == "[out of memory; the sandbox was ended]"
    assert runs_after.content == "box1"


@pytest.mark.parametrize("job", [Job("c", code="print('\ud800')"), Job("c", argv=("echo", "\udfff"))])
def test_half_a_character_never_reaches_the_sandbox(job: Job) -> None:
    session = lone()
    (result,) = runs(session, job)
    assert result.status is ToolStatus.INVALID
    assert "is not a Unicode character" in result.content
    assert not session.opened
