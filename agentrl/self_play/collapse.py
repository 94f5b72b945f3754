"""A warning when self-play has collapsed: one role always wins, or agents say nothing any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.config.self_play import MIRROR, AlarmConfig
from agentrl.core.types import Rollout
from agentrl.self_play.games import rollout_score


@dataclass(frozen=True, slots=True)
class StepPlay:
    """Statistics of the play of a step."""

    scores: Mapping[str, float]
    """Mean score of each role in mirror play, 1 for a win and 0.5 for a draw; empty without mirror play."""
    rewards: Mapping[str, float]
    """Mean reward of each role in mirror play."""
    tokens: float | None
    """Mean number of sampled tokens of an agent in an episode; None without episodes."""


def step_play(rollouts: Sequence[Rollout]) -> StepPlay:
    """Return the statistics of the policy's rollouts of a step."""
    scores: dict[str, list[float]] = {}
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.opponent == MIRROR:
            scores.setdefault(rollout.role, []).append(rollout_score(rollout))
            rewards.setdefault(rollout.role, []).append(rollout.reward)
    tokens = float(np.mean([rollout.sampled_tokens for rollout in rollouts])) if rollouts else None
    return StepPlay(
        {role: float(np.mean(role_scores)) for role, role_scores in sorted(scores.items())},
        {role: float(np.mean(role_rewards)) for role, role_rewards in sorted(rewards.items())},
        tokens,
    )


@dataclass(slots=True)
class CollapseAlarm:
    """Counts for how many steps each condition of ``self_play.alarm`` has held."""

    config: AlarmConfig
    first_tokens: float | None = None
    """Sampled tokens in the first step."""
    counts: dict[str, int] = field(default_factory=dict)
    """By key of the condition."""

    def update(self, play: StepPlay) -> list[str]:
        """Record a step and return a warning for each condition that has now held for ``steps`` steps.

        A step that does not show whether a condition holds, as one without mirror play, leaves its count as it is.
        """
        if self.first_tokens is None:
            self.first_tokens = play.tokens
        conditions = self._conditions(play)
        counts = self.counts | {key: self.counts.get(key, 0) + 1 if text else 0 for key, text in conditions.items()}
        self.counts = {key: count for key, count in counts.items() if count}
        return [
            f"{text} for {self.config.steps} steps (self_play.alarm.{key}): self-play has collapsed; go back to a checkpoint "
            "before it with more past and fixed opponents in self_play.mix, a KL term (algo.kl_coef) or algo.advantage.name=rae"
            for key, text in conditions.items()
            if text and self.counts[key] == self.config.steps
        ]

    def _conditions(self, play: StepPlay) -> dict[str, str]:
        """Return, of each condition that the step shows, how it holds in words; empty words if it does not."""
        config, conditions = self.config, {}
        if config.asymmetry is not None and len(play.scores) > 1:
            ranked = sorted(play.scores, key=lambda role: (play.scores[role], role))
            low, high = ranked[0], ranked[-1]
            holds = play.scores[high] - play.scores[low] >= config.asymmetry
            text = f"in mirror play {high} scored {play.scores[high]:.2f} and {low} {play.scores[low]:.2f}"
            conditions["asymmetry"] = text if holds else ""
        if config.reward is not None and play.rewards:
            role = max(play.rewards, key=lambda role: (abs(play.rewards[role]), role))
            holds = abs(play.rewards[role]) >= config.reward
            text = f"in mirror play the mean reward of {role} was {play.rewards[role]:.2f}"
            conditions["reward"] = text if holds else ""
        if config.length_share is not None and play.tokens is not None and self.first_tokens:
            holds = play.tokens < config.length_share * self.first_tokens
            text = f"agents sampled {play.tokens:.1f} tokens an episode, in the first step {self.first_tokens:.1f}"
            conditions["length_share"] = text if holds else ""
        return conditions

    def state(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {"first_tokens": self.first_tokens, "counts": dict(self.counts)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.first_tokens, self.counts = state["first_tokens"], dict(state["counts"])
