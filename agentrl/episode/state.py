"""Everything needed to go on with an episode, as JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.episode.trajectory import Trajectory
from agentrl.obs.rolloutformat import turn_from_dict, turn_to_dict
from agentrl.types import CallStatus, ForkReason, Message, ToolCall, Turn, json_state


@dataclass(slots=True, eq=False)
class EpisodeState:
    """An episode between two turns. The environment's own state joins it in `to_dict`."""

    rollout_id: str
    """Unique in the run."""
    seed: int
    """Seeds the environment."""
    attempt: int = 0
    """Failed attempts before this one."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    """All tokens so far, each with who made it."""
    prompt_ids: tuple[int, ...] = ()
    """The next turn's prompt; empty before the environment was reset."""
    added: int | None = None
    """Tokens at the end of ``prompt_ids`` that were appended to the trajectory's; None where the prompt was rendered anew."""
    fork: ForkReason | None = None
    """Why it was."""
    messages: list[Message] = field(default_factory=list)
    """The conversation, for templates that must be rendered anew."""
    turns: list[Turn] = field(default_factory=list)
    """What was said, for people to read; their number counts against the limit."""
    reward: float = 0.0
    """Sum so far."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's figures from the latest ``info``."""
    prompt: str = ""
    """The first prompt as text."""
    seconds: float = 0.0
    """Wall time used before it was last taken up."""

    @property
    def episode_id(self) -> str:
        """Names this attempt to engines and tools: what they answered to an earlier one must not come back."""
        return f"{self.rollout_id}~{self.attempt}" if self.attempt else self.rollout_id

    def to_dict(self, env_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state as JSON-able data, with what ``Env.get_state`` returned."""
        return {
            "rollout_id": self.rollout_id,
            "seed": self.seed,
            "attempt": self.attempt,
            "trajectory": self.trajectory.to_state(),
            "prompt_ids": list(self.prompt_ids),
            "added": self.added,
            "fork": self.fork and self.fork.value,
            "messages": [message_to_dict(message) for message in self.messages],
            "turns": [turn_to_dict(turn) for turn in self.turns],
            "reward": self.reward,
            "metrics": dict(self.metrics),
            "prompt": self.prompt,
            "seconds": self.seconds,
            "env": json_state(env_state),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> tuple[EpisodeState, dict[str, Any]]:
        """Return what `to_dict` was given: the episode's state and the environment's."""
        fields = {key: data[key] for key in ("rollout_id", "seed", "attempt", "reward", "prompt", "seconds")}
        state = cls(
            **fields,
            trajectory=Trajectory.from_state(data["trajectory"]),
            prompt_ids=tuple(data["prompt_ids"]),
            added=data["added"],
            fork=ForkReason(data["fork"]) if data["fork"] else None,
            messages=[message_from_dict(message) for message in data["messages"]],
            turns=[turn_from_dict(turn) for turn in data["turns"]],
            metrics=dict(data["metrics"]),
        )
        return state, dict(data["env"])


def message_to_dict(message: Message) -> dict[str, Any]:
    """Return a message as JSON-able data."""
    calls = [
        {
            "id": call.id,
            "name": call.name,
            "arguments": json_state(call.arguments),
            "status": call.status.value,
            "fault": call.fault,
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "inline": message.inline,
        "token_ids": list(message.token_ids),
    }


def message_from_dict(data: Mapping[str, Any]) -> Message:
    """Return what `message_to_dict` was given."""
    calls = tuple(
        ToolCall(call["id"], call["name"], call["arguments"], CallStatus(call["status"]), call["fault"])
        for call in data["tool_calls"]
    )
    return Message(data["role"], data["content"], calls, data["tool_call_id"], data["inline"], tuple(data["token_ids"]))
