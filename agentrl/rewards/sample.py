"""What a reward function gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.types import Rollout, StopReason, Turn


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

    @classmethod
    def of(cls, rollout: Rollout) -> Sample:
        """Return the sample of a rollout."""
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
        )
