"""The inputs of a training run, known before its services are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.schema import Config
from agentrl.train.rollout_source import TaskPosition


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run trains, and the state with which it starts."""

    config: Config
    folder: Path
    """Of the run."""
    model: Path
    """The folder of the initial weights."""
    state: Mapping[str, Any]
    """The trainer's state in the checkpoint, or of a new run; see `agentrl.train.trainer.Trainer.state`."""
    resumed: bool
    """Whether the folder is that of an earlier run."""
    keys: Mapping[str, str]
    """That rollouts are made with; see `agentrl.config.recorded`."""
    discard: bool = False
    """Whether nothing is used again that the journal has after the checkpoint."""

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
