"""Runs the policy's shell commands in its episode's sandbox."""

from __future__ import annotations

from agentrl import Tool, ToolCall
from agentrl.sandbox.base import Job
from agentrl.toolserver.sandbox_tool import SandboxTool

_DESCRIPTION = (
    "Run a shell command and return what it prints, standard output before standard error, and its exit status where "
    "that is not 0. Every call is a new shell; files in the working directory stay for later calls, "
    "processes in the background do not."
)
_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What to run; may have several lines."}},
    "required": ["command"],
    "additionalProperties": False,
}
_BASH_OR_SH = 'command -v bash >/dev/null && exec bash -c "$1"; exec /bin/sh -c "$1"'


class ShellTool(SandboxTool):
    """Bash in the session's sandbox, or ``/bin/sh`` if that has no bash.

    Args:
        name: what the policy calls it.
        timeout_s: seconds a call may take; None takes the sandbox's limit.
        max_chars: characters of output that the policy reads.
    """

    def __init__(self, name: str = "shell", *, timeout_s: float | None = None, max_chars: int = 8000) -> None:
        super().__init__(Tool(name, _DESCRIPTION, _PARAMETERS), max_chars=max_chars)
        self._timeout_s = timeout_s

    def job(self, call: ToolCall) -> Job:
        """Return the argument ``command`` as a job."""
        argv = ("/bin/sh", "-c", _BASH_OR_SH, "sh", call.arguments["command"])
        return Job(call.id, argv=argv, wall_s=self._timeout_s)
