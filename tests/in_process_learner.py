"""The command line with its learner in the same process: a target of `preloaded.Forked` for runs that do not test Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.cli.main import main as command_line
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.train import run as training_run


class InProcessLearner(LocalLearnerGroup):
    """What `agentrl.train.run` expects of a learner whose ranks start beside the engines."""

    def ready(self) -> None:
        """Return at once: it is loaded since it was made."""


def start_learners(
    model: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    reference: Path | None = None,
    room: Any = None,
) -> InProcessLearner:
    """Load the learner; takes the place of `agentrl.cluster.learner_group.start_learners`."""
    assert room is None, "a placement group is Ray's"
    return InProcessLearner(model, learner, algo, seed=seed, reference=reference)


def main() -> int:
    """Run the command line."""
    training_run.start_learners = start_learners  # type: ignore[assignment]
    return command_line()
