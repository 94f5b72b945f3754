"""What comes of an attempt at an episode."""

from __future__ import annotations

from agentrl.core.task import Task
from agentrl.core.types import Failure, Rollout, StopReason, json_state
from agentrl.episode.state import EpisodeState


def as_rollout(
    task: Task,
    state: EpisodeState,
    reason: StopReason,
    seconds: float,
    tool_seconds: float,
    failure: Failure | None = None,
) -> Rollout:
    """Return an attempt as a rollout. One that was aborted is dropped: it was cut at no point of its own choosing."""
    return Rollout(
        prompt_id=task.id,
        rollout_id=state.rollout_id,
        rows=state.trajectory.rows(task.id, state.rollout_id),
        reward=state.reward,
        stop_reason=reason,
        metrics=state.metrics,
        turns=state.all_turns,
        prompt=state.prompt,
        failure=failure,
        dropped=reason is StopReason.ABORTED,
        seconds=seconds,
        tool_seconds=tool_seconds,
        sampled_tokens=state.trajectory.sampled_tokens,
        metadata=dict(task.metadata),
        label=json_state(task.answer),
    )
