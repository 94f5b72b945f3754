"""Failure policy: whether a failed episode is trained on, dropped or retried, or stops the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.rollout import FailureAction, FailureConfig
from agentrl.core.errors import RunStopped
from agentrl.core.types import Failure, Rollout


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Decides on failed episodes by the kind of their failure."""

    config: FailureConfig

    def decide(self, failure: Failure, attempt: int) -> FailureAction:
        """Return what to do after ``attempt`` (from 0) failed; a last failed retry is dropped."""
        action: FailureAction = getattr(self.config, failure.kind.value)
        return "drop" if action == "retry" and attempt >= self.config.max_retries else action

    def check_dropped(self, rollouts: Sequence[Rollout]) -> None:
        """Check the number of dropped episodes.

        Raises:
            RunStopped: it is more than ``rollout.failure.max_failed_share`` of them.
        """
        failures = [rollout.failure for rollout in rollouts if rollout.dropped and rollout.failure is not None]
        if len(failures) > self.config.max_failed_share * len(rollouts):
            common, times = Counter(map(describe_failure, failures)).most_common(1)[0]
            raise RunStopped(
                f"{len(failures)} of {len(rollouts)} episodes failed for good, more than "
                f"rollout.failure.max_failed_share={self.config.max_failed_share:g}; {times} of them with: {common}"
            )


def describe_failure(failure: Failure) -> str:
    """Return the kind and the message of a failure."""
    return f"{failure.error}: {failure.message}"
