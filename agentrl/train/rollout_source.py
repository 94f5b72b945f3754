"""The inputs of a run, and the interface between trainer and rollouts (`agentrl.train.sampling`, `agentrl.train.replay`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.learner.base import LearnerGroup
from agentrl.obs.progress import Stopwatch
from agentrl.train.warm_start import WarmStart


@dataclass(frozen=True, slots=True)
class TaskPosition:
    """Which tasks of an order were consumed: trained, or filtered."""

    first: int = 0
    """All before it were."""
    ahead: tuple[int, ...] = ()
    """Those from ``first`` on that were, ascending. Empty without ``async.max_staleness``."""

    def __contains__(self, position: object) -> bool:
        """Return whether the task at a position was consumed."""
        return isinstance(position, int) and (position < self.first or position in self.ahead)

    def untrained_positions(self) -> Iterator[int]:
        """Return all positions that were not consumed, from ``first`` on, without end."""
        consumed = frozenset(self.ahead)
        return (position for position in count(self.first) if position not in consumed)

    def after(self, consumed: Collection[int]) -> TaskPosition:
        """Return the position after the tasks at ``consumed`` were trained or filtered."""
        assert min(consumed, default=self.first) >= self.first, "a task is consumed once"
        assert not set(consumed) & set(self.ahead), "a task is consumed once"
        ahead, first = {*self.ahead, *consumed}, self.first
        while first in ahead:
            first += 1
        return TaskPosition(first, tuple(sorted(position for position in ahead if position > first)))


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """What a training step trains on."""

    rollouts: list[Rollout]
    """Grouped by task."""
    position: TaskPosition
    """In the task order, once they are trained."""
    filtered: list[Rollout] = field(default_factory=list)
    """Rollouts of groups that ``rollout.filter_groups`` dropped, which are not trained."""
    sampled: bool = True
    """Whether they were sampled for the step, and not read from the journal."""


Consumer = Callable[[list[Rollout]], Awaitable[None]]
"""Gets the rollouts of groups that belong to a step whose batch is not full."""


class RolloutSource(ABC):
    """Supplies the trainer with rollouts, and receives the weights that the learner trains on them.

    The methods that are not abstract do nothing, for sources without engines.
    """

    samples: ClassVar[bool] = False
    """Whether `get_rollouts` samples them, so that its duration is a sampling time."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Steps to train."""

    @property
    def epoch_steps(self) -> int | None:
        """Full batches of the tasks of ``train.epochs``; None without it."""
        return None

    @property
    def progress(self) -> float:
        """Share of the tasks of ``train.epochs`` that are trained or filtered, from 0 to 1; 0 without it."""
        return 0.0

    @property
    @abstractmethod
    def pad_token_id(self) -> int:
        """The token that fills batches."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""

    @abstractmethod
    async def get_rollouts(
        self, step: int, position: TaskPosition, consume: Consumer | None = None
    ) -> StepRollouts | None:
        """Return the rollouts of ``step`` (from 1), of tasks that were not trained at ``position``.

        Args:
            step: from 1.
            position: of the tasks that were trained.
            consume: may be called with groups of the step before all are there. It may use the learner.

        Returns:
            None if the tasks of ``train.epochs`` that are left do not fill a batch.

        Raises:
            AgentrlError: sampling or reading failed; `RunStopped` if Ctrl-C or the failure policy ends the run.
        """

    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:  # noqa: B027
        """Sync the learner's weights, as policy ``version``, to the engines; ``watch`` gets the seconds."""

    async def release_gpus_for_training(self, learner: LearnerGroup, watch: Stopwatch) -> None:  # noqa: B027
        """Release GPU memory that the learner needs to train, until `sync_weights`; ``watch`` gets the seconds."""

    async def on_step_trained(self, step: int, advantages: Mapping[str, float]) -> None:  # noqa: B027
        """Record that ``step`` was trained, with the advantages of its rollouts by ``rollout_id``."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs of the source, JSON-able."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return sampling metrics for the row of a step, collected since the last call."""
        return {}


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run trains, and the state with which it starts."""

    config: Config
    folder: Path
    """Folder of the run."""
    model: Path
    """The folder of the initial weights, which ``warm_start`` writes if there is one."""
    state: Mapping[str, Any]
    """The trainer's state in the checkpoint, or of a new run; see `agentrl.train.trainer.Trainer.state`."""
    resumed: bool
    """Whether the folder is that of an earlier run."""
    keys: Mapping[str, str]
    """That rollouts are made with; see `agentrl.config.recorded`."""
    discard: bool = False
    """Whether nothing is used again that the journal has after the checkpoint."""
    warm_start: WarmStart | None = None
    """The warm start that is to be made."""

    @property
    def shape(self) -> Path:
        """The folder of a model with the tokens and the shape of the initial one, which is there before a warm start."""
        return self.model if self.warm_start is None else self.warm_start.base

    @property
    def step(self) -> int:
        """Finished steps."""
        return int(self.state["step"])

    @property
    def resume_after(self) -> int | None:
        """What was recorded after this step is deleted; None keeps all."""
        return self.step if self.resumed else None

    @property
    def position(self) -> TaskPosition:
        """The trained tasks of the task order."""
        return TaskPosition(self.state["position"], tuple(self.state.get("trained_ahead", ())))
