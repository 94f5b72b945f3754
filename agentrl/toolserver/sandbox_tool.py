"""Tools that run code: `SandboxTool`, and the text of an outcome that the policy reads."""

from __future__ import annotations

from abc import abstractmethod

from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.base import Job, Outcome
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession

REPLACED = "[the sandbox had to be replaced since the last call: files and variables are lost]"
"""Precedes the output of the first call in a new sandbox."""
_SEEN = "id of the sandbox"
"""Key in a session's state. No tool has a name with spaces."""


class SandboxTool(HostedTool):
    """A tool whose calls are jobs in the session's sandbox.

    Args:
        spec: see `HostedTool`.
        max_chars: characters of output that the policy reads, see `as_result`.
    """

    def __init__(self, spec: Tool, *, max_chars: int = 8000) -> None:
        super().__init__(spec)
        self._max_chars = max_chars

    @abstractmethod
    def job(self, call: ToolCall) -> Job:
        """Return what a call runs; its arguments fit the schema."""

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run the call's job; the result begins with `REPLACED` if files of earlier calls are lost.

        Raises:
            SandboxFailure: the sandbox failed, not the job.
        """
        job = self.job(call)
        fault = unwritable(job.code or "", *job.argv)
        if fault:
            return ToolResult(call.id, ToolStatus.INVALID, f"{call.name}: {fault}")
        sandbox = await session.sandbox()
        previous_sandbox_id = session.state.get(_SEEN, sandbox.id)
        session.state[_SEEN] = sandbox.id
        outcome = await sandbox.run(job)
        if not sandbox.alive:
            del session.state[_SEEN]  # the outcome reports it
        return as_result(call, outcome, self._max_chars, note="" if previous_sandbox_id == sandbox.id else REPLACED)


def unwritable(*texts: str) -> str:
    """Return why texts cannot be passed to a program, or an empty string: JSON can hold lone surrogates."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} of the text is not a Unicode character: {error.reason}"
    return ""


def as_result(call: ToolCall, outcome: Outcome, max_chars: int, *, note: str = "") -> ToolResult:
    r"""Return an outcome as the policy reads it, and as data.

    The content is the output, standard output before standard error, and lines in brackets for what ended the job:
    ``"1\n2\n[timed out after 10 s]"``. Without any of them it is ``[no output]``. The data are
    ``{"stdout", "stderr", "exit_code", "seconds", "detail"}``, uncut.

    Args:
        call: the call that it answers.
        outcome: of its job.
        max_chars: characters of output to show; the middle of longer outputs is left out.
        note: the first line.
    """
    printed = "\n".join(text for text in (outcome.stdout.rstrip("\n"), outcome.stderr.rstrip("\n")) if text)
    failed = outcome.status is ToolStatus.ERROR and outcome.exit_code is not None
    exit_status = f"[exit status {outcome.exit_code}]" if failed else ""
    detail = f"[{outcome.detail}]" if outcome.detail else ""
    lines = [note, cut_middle(printed, max_chars), exit_status, detail]
    data = {
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        "exit_code": outcome.exit_code,
        "seconds": outcome.seconds,
        "detail": outcome.detail,
    }
    content = "\n".join(line for line in lines if line) or "[no output]"
    return ToolResult(call.id, outcome.status, content, data)


def cut_middle(text: str, max_chars: int) -> str:
    """Return a text of at most ``max_chars`` as it is, a longer one with its middle replaced by a line with its length."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    end = text[len(text) - tail :]
    return f"{text[:head]}\n[… {len(text) - max_chars} characters left out …]\n{end}"
