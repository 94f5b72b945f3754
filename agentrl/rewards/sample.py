"""What a reward function gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.errors import ToolFailure
from agentrl.core.tool import CallTool
from agentrl.core.types import Rollout, StopReason, ToolResult, Turn


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished episode, for a reward function to look at. It changes nothing of it but by what it returns."""

    prompt: str
    """The first prompt as text, as the policy saw it: chat template included."""
    response: str
    """Everything after the prompt: what the policy said and, in several turns, what it was answered in between."""
    final: str
    """What the policy said in its last turn, its end token left out; all of it was sampled. Empty if it said nothing."""
    label: Any
    """The right answer as the task has it (``data.label_key``), or None."""
    metadata: Mapping[str, Any]
    """The task's further facts (``data.metadata_key``)."""
    prompt_id: str
    """The task's id; the samples of one group share it."""
    rollout_id: str
    """Unique in the run."""
    turns: tuple[Turn, ...]
    """What was said and answered, turn by turn."""
    stop_reason: StopReason
    """Why the episode ended."""
    rollout: Rollout
    """All there is, tokens and environment metrics included."""
    tools: CallTool | None = field(default=None, repr=False, compare=False)
    """Runs tools in the episode's sessions; see `call_tool`."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Run a tool of the run's servers in the episode's own session: files that the policy wrote are there.

        For an ``async def`` reward function. Sessions end when the reward is there.

        Example::

            async def score(sample):
                tests = await sample.call_tool("python", {"code": "import check; print(check.passed())"})
                return float(tests.content.strip() == "True")

        Raises:
            ToolFailure, SandboxFailure: the server or the sandbox failed: the rollout is dropped, if this is not caught.
        """
        if self.tools is None:
            raise ToolFailure(f"tool {name!r}: the sessions of episode {self.rollout_id} are closed")
        return await self.tools(name, arguments or {})

    @classmethod
    def of(cls, rollout: Rollout, tools: CallTool | None = None) -> Sample:
        """Return the sample of a rollout, with what runs tools in its episode's sessions where those are open."""
        return cls(
            prompt=rollout.prompt,
            response="".join(turn.action + turn.observation for turn in rollout.turns),
            final=rollout.turns[-1].action if rollout.turns else "",
            label=rollout.label,
            metadata=rollout.metadata,
            prompt_id=rollout.prompt_id,
            rollout_id=rollout.rollout_id,
            turns=tuple(rollout.turns),
            stop_reason=rollout.stop_reason,
            rollout=rollout,
            tools=tools,
        )
