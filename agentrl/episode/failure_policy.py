"""Failure policy: whether a failed episode is trained on, dropped or retried, or stops the run."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.config.rollout import FailureAction, FailureConfig
from agentrl.core.types import Failure


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Decides on failed episodes by the kind of their failure."""

    config: FailureConfig

    def decide(self, failure: Failure, attempt: int) -> FailureAction:
        """Return what to do after ``attempt`` (from 0) failed; a last failed retry is dropped."""
        action: FailureAction = getattr(self.config, failure.kind.value)
        return "drop" if action == "retry" and attempt >= self.config.max_retries else action

    def too_many(self, dropped: int, episodes: int) -> bool:
        """Return whether so many of a step's episodes were dropped that the run should stop."""
        return dropped > self.config.max_failed_share * episodes
