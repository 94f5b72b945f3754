"""Runs of the suite of small learning tasks with agentrl."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from agentrl.config.schema import Config
from agentrl.train.preflight import check_run
from agentrl.train.run import RunExtras, RunStart, run_training
from benchmarks.learning_suite import AGENTRL, Result

_SCORE = "eval/reward"


class ScoreTracker:
    """Receives the metrics of a run, and keeps the scores of its evaluations and the time of its steps."""

    def __init__(self) -> None:
        self.scores: dict[int, float] = {}
        self.steps = 0
        self.training_s = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Read the metrics of a step or an evaluation."""
        if _SCORE in metrics:
            self.scores[step] = metrics[_SCORE]
        if "time/step_s" in metrics:
            self.steps = step
            self.training_s += metrics["time/step_s"]

    def samples(self, step: int, table: Sequence[Sequence[object]]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def train(task: str, policy: str, config: Config, console: Console) -> Result:
    """Train one task, with its warm start.

    Raises:
        ConfigError: the run cannot start; see `check_run`.
        AgentrlError: it failed.
    """
    begun, tracker = time.monotonic(), ScoreTracker()
    contents = check_run(config).contents
    asyncio.run(run_training(config, console, RunStart(contents=contents), RunExtras([tracker])))
    return Result(
        task,
        policy,
        AGENTRL,
        config.run.seed,
        tracker.scores[min(tracker.scores)],
        tracker.scores[max(tracker.scores)],
        (time.monotonic() - begun) / 60,
        tracker.training_s / 60,
        tracker.steps,
    )
