"""Scores a program on hidden tests, each in a separate process, in sandboxes that the episode has never touched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from agentrl import Tool, ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job, Sandbox
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession

from .options import JudgeOptions
from .traces import Look, look
from .verdicts import Rule, Verdict, judge_outcome

_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
PARAMETERS = {
    "type": "object",
    "properties": {
        "program": {"type": "string", "description": "A Python program; reads standard input, prints its answer."},
        "inputs": {**_TEXTS, "description": "Standard input of each test."},
        "outputs": {**_TEXTS, "description": "What is to be printed, one for each input."},
        "compare": {"enum": ["tokens", "lines"], "default": "tokens"},
        "tolerance": {
            "type": "number",
            "minimum": 0,
            "description": "How far numbers may differ; without it not at all.",
        },
        "stop_early": {"type": "boolean", "default": False, "description": "End with the first test that fails."},
    },
    "required": ["program", "inputs", "outputs"],
    "additionalProperties": False,
}


class JudgeTool(HostedTool):
    """The judge. Only inputs enter a sandbox; the expected outputs stay in the server.

    A program has a fresh sandbox, and every test a new process in it; all processes of the test before are dead by
    then. If a test left any trace (a file, shared memory, a counter that went up), the next one gets another fresh sandbox.
    """

    def __init__(self, options: JudgeOptions | None = None) -> None:
        super().__init__(Tool("judge", "Run a program on hidden tests and say how each ended.", PARAMETERS))
        self._options = options or JudgeOptions()
        self._slots = asyncio.Semaphore(self._options.at_once)

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Judge ``program``. The result's data are ``{"verdicts": [one a test]}``; its content counts them.

        Raises:
            SandboxFailure: a sandbox failed; there is no verdict then.
        """
        arguments = call.arguments
        fault = _find_fault(arguments)
        if fault:
            return ToolResult(call.id, ToolStatus.INVALID, f"judge: {fault}")
        async with self._slots:
            verdicts = await self._judge(session, arguments)
        passed = verdicts.count(Verdict.ACCEPTED)
        content = f"{passed} of {len(verdicts)} tests passed"
        return ToolResult(call.id, ToolStatus.OK, content, {"verdicts": [verdict.value for verdict in verdicts]})

    async def _judge(self, session: ToolSession, arguments: Mapping[str, Any]) -> Sequence[Verdict]:
        rule = Rule(arguments.get("compare", "tokens"), arguments.get("tolerance"))
        verdicts = [Verdict.NOT_RUN] * len(arguments["inputs"])
        async with aclosing(_Sandboxes(session)) as next_sandbox:
            for number, (stdin, expected) in enumerate(zip(arguments["inputs"], arguments["outputs"], strict=True)):
                last = number == len(verdicts) - 1
                sandbox = await next_sandbox(number, last=last)
                job = Job(
                    f"test-{number}",
                    code=arguments["program"],
                    stdin=stdin.encode(),
                    wall_s=self._options.wall_s,
                    cpu_s=self._options.time_s,
                    output_bytes=self._options.output_kb * 1024,
                )
                verdicts[number] = judge_outcome(await sandbox.run(job), expected, rule)
                if verdicts[number] is not Verdict.ACCEPTED and arguments.get("stop_early", False):
                    break
        return verdicts


class _Sandboxes:
    """Fresh sandboxes, one after the other, as they are needed."""

    def __init__(self, session: ToolSession) -> None:
        self._session = session
        self._open = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._look: Look | None = None
        self._steps: tuple[int, ...] | None = None
        """How far one look moves the counters."""

    async def __call__(self, number: int, *, last: bool) -> Sandbox:
        """Return a sandbox in which nothing is left of earlier tests."""
        if self._sandbox is not None and await self._is_as_before(self._sandbox, number):
            return self._sandbox
        await self.aclose()
        self._sandbox = await self._open.enter_async_context(self._session.fresh_sandbox())
        self._look = self._steps = None
        if not last:
            first, self._look = [await look(self._sandbox, 3 * number + index) for index in (1, 2)]
            self._steps = first.steps(self._look) if first is not None and self._look is not None else None
        return self._sandbox

    async def _is_as_before(self, sandbox: Sandbox, number: int) -> bool:
        if not sandbox.alive or self._look is None or self._steps is None:
            return False
        earlier, self._look = self._look, await look(sandbox, 3 * number)
        processes, *steps = self._steps  # the test is one process more
        return self._look is not None and earlier.steps(self._look) == (2 * processes, *steps)

    async def aclose(self) -> None:
        await self._open.aclose()
        self._sandbox = None


def _find_fault(arguments: Mapping[str, Any]) -> str:
    if len(arguments["inputs"]) != len(arguments["outputs"]):
        return f"{len(arguments['inputs'])} inputs and {len(arguments['outputs'])} outputs; every test has one of each"
    try:
        for text in (arguments["program"], *arguments["inputs"]):
            text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of a text is not a Unicode character: {error.reason}"
    return ""
