"""Commands of the policy in the machine of its task."""

from __future__ import annotations

from agentrl import Tool, ToolCall, ToolResult, ToolStatus
from agentrl.containers.machine import Command, CommandResult, MachineEndedError
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.sandbox_tool import cut_middle, unwritable

from .episodes import Episodes

BASH = "bash"
_DESCRIPTION = (
    "Run a command in a shell of the machine and return what it prints, and its exit status where that is not 0. Every call is a "
    "new shell in the working directory, without input: variables and changes of directory end with it; files, and processes in "
    "the background, stay. A command that takes longer than {timeout_s:g} s is stopped with all that it has started."
)
_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "What to run; may have several lines."}},
    "required": ["command"],
    "additionalProperties": False,
}
_BASH_OR_SH = 'exec 2>&1; command -v bash >/dev/null && exec bash -c "$1"; exec /bin/sh -c "$1"'
"""Standard output and error are one stream, in the order in which they are printed."""
_ENV = {"TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat"}
"""Programs neither wait for keys nor draw."""
_BYTES_OF_A_CHARACTER = 4


class BashTool(HostedTool):
    """Runs the policy's commands. A call's id is the episode's key, a hyphen, and the number of the call.

    Args:
        episodes: of the server.
        timeout_s: seconds that a command may take.
        max_chars: characters of output that the policy reads.
    """

    def __init__(self, episodes: Episodes, *, timeout_s: float, max_chars: int) -> None:
        super().__init__(Tool(BASH, _DESCRIPTION.format(timeout_s=timeout_s), _PARAMETERS, timeout_s=timeout_s))
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._max_chars = max_chars

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Run a command, or take up the one that was begun with this id.

        Raises:
            SandboxFailure: the machine is gone, or has run commands that the conversation does not have.
        """
        text = call.arguments["command"]
        if fault := unwritable(text) or ("a command cannot have a null character" if "\0" in text else ""):
            return ToolResult(call.id, ToolStatus.INVALID, f"{call.name}: {fault}")
        key, _, _ = call.id.partition("-")
        session.state[key] = self._episodes
        episode = await self._episodes.find(key)
        command = Command(
            ("/bin/sh", "-c", _BASH_OR_SH, "sh", text),
            user=episode.user,
            env=_ENV,
            wall_s=self._timeout_s,
            output_bytes=_BYTES_OF_A_CHARACTER * self._max_chars,
            call_id=call.id,
        )
        async with episode.lock:
            try:
                result = await episode.run(command)
            except MachineEndedError as error:
                if not error.is_by_policy:
                    raise
                data = {"exit_code": None, "seconds": 0.0, "is_cut": False}
                return ToolResult(call.id, ToolStatus.KILLED, f"[{error}]", data)
        return as_result(call, result, self._timeout_s, self._max_chars)


def as_result(call: ToolCall, result: CommandResult, timeout_s: float, max_chars: int) -> ToolResult:
    """Return how a command ended as the policy reads it: its output, and lines in brackets for what else there is to say."""
    status, note = ToolStatus.OK, ""
    if result.timed_out:
        status, note = ToolStatus.TIMEOUT, f"[stopped after {timeout_s:g} s, with all that it has started]"
    elif result.flooded:
        status, note = ToolStatus.OUTPUT_CUT, "[stopped, since it printed without end]"
    elif result.exit_code != 0:
        status, note = ToolStatus.ERROR, f"[exit status {result.exit_code}]"
    restarted = "[all processes of the machine were stopped]" if result.restarted else ""
    lines = [cut_middle(result.output.rstrip("\n"), max_chars), note, restarted]
    is_cut = result.is_cut or len(result.output) > max_chars
    data = {"exit_code": result.exit_code, "seconds": result.seconds, "is_cut": is_cut}
    return ToolResult(call.id, status, "\n".join(line for line in lines if line) or "[no output]", data)
