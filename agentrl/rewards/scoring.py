"""What gives rewards: functions, remote reward models and judges have one interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.errors import EpisodeError, ServiceError
from agentrl.rewards.sample import Sample


@dataclass(frozen=True, slots=True)
class Outcome:
    """The reward of a sample, or why it has none. Example: ``Outcome(0.5, {"calls": 2.0})``."""

    reward: float | None = None
    """Finite; None with an ``error``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name, such as the cost of a judge; also of a sample without a reward."""
    error: BaseException | None = None
    """Why there is no reward."""

    @property
    def is_outage(self) -> bool:
        """Whether a service, a judge, a tool or a sandbox failed: no fault of the function, and no reward whatever is set."""
        return isinstance(self.error, EpisodeError | ServiceError)


class Scorer(Protocol):
    """Scores finished episodes."""

    @property
    def group(self) -> bool:
        """Whether it needs all samples of a task at once; otherwise it gets them one by one."""
        ...

    @property
    def metric_prefix(self) -> str:
        """What the names of its metrics begin with, if it is the only one; may be empty."""
        ...

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return an outcome for each sample. It raises only for what ends the run: its cancellation, and Ctrl-C."""
        ...
