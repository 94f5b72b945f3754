"""The command line with its learner in the same process: a target of `preloaded.Forked` for runs that do not test Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.cli.main import main as command_line
from agentrl.cluster import run_cluster
from agentrl.cluster.placement_group import ReservedPlacement
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.schema import Config
from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from agentrl.train import run


class InProcessLearner(LocalLearnerGroup):
    """The part of `RayLearnerGroup` that `agentrl.cluster.run_cluster` uses: it loads the model when it is to be ready."""

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int, reference: Path | None = None
    ) -> None:
        self._load_model = partial(super().__init__, folder, config, algo, seed=seed, reference=reference)
        self._is_loaded = False

    def ready(self) -> None:
        """Load the model, which a warm start may write after the learner was made."""
        if not self._is_loaded:
            self._load_model()
            self._is_loaded = True

    def close(self) -> None:
        """Leave the process group."""
        if self._is_loaded:
            super().close()

    def check(self) -> None:
        """It has no processes that could be lost."""

    def end(self, why: str) -> None:
        """It has no processes that could be killed: who ends it waits until it has loaded."""


def start_learners(
    model: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    reference: Path | None = None,
    trust_remote_code: bool = False,
    cluster: Any = None,
) -> InProcessLearner:
    """Make the learner; takes the place of `agentrl.cluster.learner_group.start_learners`."""
    assert not isinstance(cluster, ReservedPlacement), "a placement group is Ray's"
    return InProcessLearner(model, learner, algo, seed=seed, reference=reference)


class InProcessCritic(LocalCritic):
    """The part of `RayCritic` that `agentrl.cluster.run_cluster` uses."""

    def ready(self) -> None:
        """Return at once: it is loaded since it was made."""

    def check(self) -> None:
        """It has no processes that could be lost."""

    def end(self, why: str) -> None:
        """It has no processes that could be killed."""


def start_critic(
    model: Path,
    learner: LearnerConfig,
    algo: AlgoConfig,
    *,
    seed: int,
    run_dir: Path,
    policy: Any,
    trust_remote_code: bool = False,
    placement: Any = None,
) -> InProcessCritic:
    """Load the critic; takes the place of `agentrl.cluster.learner_group.start_critic`."""
    assert placement is None, "a placement group is Ray's"
    return InProcessCritic(model, learner, algo, seed=seed)


def no_curve(config: Config, folder: Path, console: Console) -> None:
    """Take the place of `agentrl.train.run_outputs.draw_curve`, which takes a second; runs that test Ray draw theirs."""


def main() -> int:
    """Run the command line."""
    training_run: Any = run
    cluster: Any = run_cluster
    training_run.draw_curve = no_curve
    cluster.start_critic = start_critic
    cluster.start_learners = start_learners
    return command_line()
