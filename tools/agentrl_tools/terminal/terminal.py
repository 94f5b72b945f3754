"""Opens the machine of an episode, and grades what was done in it; for environments, never for policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl import Tool, ToolCall, ToolResult, ToolStatus
from agentrl.containers.grading import single_reward
from agentrl.containers.machine_access import MachineAccess
from agentrl.containers.task_skills import agent_instruction
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession

from .episodes import Episode, Episodes

TERMINAL = "terminal"
PARAMETERS = {
    "type": "object",
    "properties": {
        "action": {"enum": ["open", "call", "grade"]},
        "folder": {"type": "string", "description": "With open: the task's folder."},
        "connect": {
            "type": "boolean",
            "description": "With open: connect to the task's MCP servers, for tools of the policy; default true.",
        },
        "server": {"type": "string", "description": "With call: the task's MCP server."},
        "tool": {"type": "string", "description": "With call: its tool."},
        "arguments": {"type": "object", "description": "With call: arguments of the tool."},
        "step": {"type": "integer", "minimum": 0, "description": "With grade: the step, from 0."},
        "calls": {
            "type": "integer",
            "minimum": 0,
            "description": "With grade: commands that the conversation has, if it is known.",
        },
        "rewards": {
            "type": "array",
            "items": {"type": "object"},
            "description": "With grade: rewards of the steps so far.",
        },
    },
    "required": ["action"],
    "additionalProperties": False,
}


class TerminalTool(HostedTool):
    """Opens, calls tools of the task's MCP servers, and grades. A call's id is the episode's key, a hyphen, and the call's name.

    ``open`` returns the data ``{"instruction", "steps", "machine", "tools"}``: the machine as `MachineAccess` for agent programs,
    which work in it themselves, and the tools as `McpServers.tools` describes them; with ``connect`` false the access has the
    task's MCP servers in their place. ``call`` returns the tool's result. ``grade`` returns ``{"rewards", "task_rewards",
    "reward", "instruction", "machine", "forgeable", "at_limit", "refused", "output", "seconds"}``: rewards of
    the step by name, those of the task so far, and as one number; the next step's instruction and access, or None after the last.
    """

    def __init__(self, episodes: Episodes) -> None:
        super().__init__(Tool(TERMINAL, "Open the machine of a task, or grade what was done in it.", PARAMETERS))
        self._episodes = episodes

    async def start(self) -> None:
        """Connect to the Docker daemons.

        Raises:
            MissingError: none answers.
        """
        await self._episodes.start()

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Open a machine, call a tool, or grade.

        Raises:
            SandboxFailure: there is no machine, or it is not as the conversation has it.
            GradingFailure: the tests gave no reward.
        """
        key, _, _ = call.id.partition("-")
        session.state[key] = self._episodes
        if call.arguments["action"] == "open":
            episode = await self._episodes.begin(key, Path(call.arguments["folder"]))
            episode.program_connects = not call.arguments.get("connect", True)
            data: Mapping[str, Any] = {
                "instruction": await agent_instruction(episode.folder, episode.machine),
                "steps": len(episode.folder.steps),
                "machine": _access(episode),
                "tools": [] if episode.program_connects else await episode.mcp_servers.tools(episode.user),
            }
            return ToolResult(call.id, ToolStatus.OK, "open", data)
        if call.arguments["action"] == "call":
            episode = await self._episodes.find(key)
            async with episode.lock:
                return await episode.call_tool(call)
        return ToolResult(call.id, ToolStatus.OK, "graded", await self._grade(key, call.arguments))

    async def _grade(self, key: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        step = arguments["step"]
        recorded = self._episodes.recorded_grade(key)
        if recorded is not None and (recorded["step"], recorded["calls"]) == (step, arguments.get("calls")):
            result: Mapping[str, Any] = recorded["result"]
            return result
        episode = await self._episodes.find(key)
        async with episode.lock:
            if "calls" in arguments:
                episode.check_calls(arguments["calls"])
            grade = await self._episodes.grade(episode, step)
            rewards = [*arguments["rewards"], dict(grade.rewards)]
            task_rewards = episode.folder.reward(rewards)
            goes_on = step + 1 < len(episode.folder.steps) and episode.folder.steps[step].allows_next(grade.rewards)
            if goes_on:
                await self._episodes.next_step(episode, step + 1)
        result = {
            "rewards": dict(grade.rewards),
            "task_rewards": task_rewards,
            "reward": single_reward(task_rewards),
            "instruction": episode.folder.steps[step + 1].instruction if goes_on else None,
            "machine": _access(episode) if goes_on else None,
            "forgeable": grade.forgeable,
            "at_limit": grade.at_limit,
            "refused": dict(grade.refused),
            "output": grade.output,
            "seconds": grade.seconds,
        }
        if not goes_on:
            episode.record.grade = {"step": step, "calls": arguments.get("calls"), "result": result}
            episode.save()
        return result

    async def end(self, session: ToolSession) -> None:
        """Remove the machines of the session's episode, unless the server stops: another one may continue with them."""
        if session.server_stops:
            return
        for key in [key for key, owner in session.state.items() if owner is self._episodes]:
            await self._episodes.end(key)

    async def close(self) -> None:
        """Close the connections; machines of episodes that continue elsewhere stay."""
        await self._episodes.close()


def _access(episode: Episode) -> dict[str, Any]:
    timeout_s = episode.folder.steps[episode.record.step].timeout_s
    servers = episode.mcp_servers.descriptions() if episode.program_connects else {}
    return MachineAccess.from_machine(episode.machine, episode.user, timeout_s, servers).model_dump(mode="json")
