"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.errors import ToolFailure
from agentrl.core.tool import CallTool
from agentrl.core.types import ANSWER, Rollout, StopReason, ToolResult, Turn


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished episode, as a reward function receives it. Read-only: only the function's result has an effect."""

    prompt: str
    """The first prompt as text, as the policy saw it: chat template included."""
    response: str
    """Everything after the prompt: the policy's turns, and the observations between them."""
    final: str
    """The policy's last turn without its end token; only sampled text. Empty if there is none. Of an agent program it is the
    final answer (``rollout.agent.answer``), and of an environment that names it (``info["final_answer"]``), that."""
    label: Any
    """The task's right answer (``data.label_key``), or None."""
    metadata: Mapping[str, Any]
    """The task's metadata (``data.metadata_key``)."""
    prompt_id: str
    """The task's id; the samples of one group share it."""
    rollout_id: str
    """Unique in the run."""
    turns: tuple[Turn, ...]
    """Actions and observations, turn by turn."""
    stop_reason: StopReason
    """Why the episode ended."""
    rollout: Rollout
    """The whole rollout, with tokens and environment metrics."""
    tools: CallTool | None = field(default=None, repr=False, compare=False)
    """Function that runs tools in the episode's sessions; see `call_tool`."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run a tool of the run's servers in the episode's session: files that the policy wrote are there.

        For an ``async def`` reward function. Sessions end after the reward function has returned.

        Example::

            async def score(sample):
                tests = await sample.call_tool("python", {"code": "import check; print(check.passed())"})
                return float(tests.content.strip() == "True")

        Raises:
            ToolFailure, SandboxFailure: the server or the sandbox failed. If it is not caught, the rollout is dropped.
        """
        if self.tools is None:
            raise ToolFailure(f"tool {name!r}: the sessions of episode {self.rollout_id} are closed")
        return await self.tools(name, arguments or {})

    @classmethod
    def from_rollout(cls, rollout: Rollout, tools: CallTool | None = None) -> Sample:
        """Return the sample of a rollout; ``tools`` runs tools in its episode's sessions, while those are open."""
        return cls(
            prompt=rollout.prompt,
            response="".join(turn.action + turn.observation for turn in rollout.turns),
            final=rollout.metadata.get(ANSWER, rollout.turns[-1].action if rollout.turns else ""),
            label=rollout.label,
            metadata=rollout.metadata,
            prompt_id=rollout.prompt_id,
            rollout_id=rollout.rollout_id,
            turns=tuple(rollout.turns),
            stop_reason=rollout.stop_reason,
            rollout=rollout,
            tools=tools,
        )
