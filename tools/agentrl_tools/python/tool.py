"""Runs the policy's Python code in its episode's sandbox."""

from __future__ import annotations

import re

from agentrl import Tool, ToolCall
from agentrl.sandbox.base import Job
from agentrl.toolserver.sandbox_tool import SandboxTool

_DESCRIPTION = (
    "Run Python code and return what it prints, standard output before standard error. "
    "Only printed values are seen. Files in the working directory stay for later calls; "
)
_STATELESS = "every call is a new program, so variables and imports do not stay."
_STATEFUL = "variables, functions and imports stay for later calls too."
_LANGUAGE = re.compile(r"[\w+-]*")
_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "A complete Python program."}},
    "required": ["code"],
    "additionalProperties": False,
}


class PythonTool(SandboxTool):
    """Python in the session's sandbox.

    Args:
        name: what the policy calls it.
        stateful: keep variables from call to call.
        timeout_s: seconds a call may take; None takes the sandbox's limit.
        max_chars: characters of output that the policy reads.
    """

    def __init__(
        self, name: str = "python", *, stateful: bool = False, timeout_s: float | None = None, max_chars: int = 8000
    ) -> None:
        spec = Tool(name, _DESCRIPTION + (_STATEFUL if stateful else _STATELESS), _PARAMETERS)
        super().__init__(spec, max_chars=max_chars)
        self._stateful = stateful
        self._timeout_s = timeout_s

    def job(self, call: ToolCall) -> Job:
        """Return the argument ``code`` as a job."""
        code = without_fence(call.arguments["code"])
        return Job(call.id, code=code, wall_s=self._timeout_s, stateful=self._stateful)


def without_fence(code: str) -> str:
    """Return code without a Markdown fence around all of it, which many policies cannot help writing."""
    text = code.strip()
    first, newline, body = text.partition("\n")
    fence = first[: len(first) - len(first.lstrip(first[:1]))]
    language = first[len(fence) :].strip()
    if fence[:3] not in ("```", "~~~") or not newline or not body.endswith(fence) or not _LANGUAGE.fullmatch(language):
        return code
    return body.removesuffix(fence).rstrip(" \t").removesuffix("\n").removesuffix("\r")
