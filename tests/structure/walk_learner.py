"""Learner ranks in this process behind the driver's side of Ray actors: the calls are those of a run, without Ray's transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.cluster import rank_actors, run_cluster
from agentrl.cluster.learner_actor import RankLayout
from agentrl.cluster.learner_group import RayLearnerGroup
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.train import run


class LocalActor:
    """An actor handle whose calls run at once, in this process."""

    def __init__(self, group: LocalLearnerGroup) -> None:
        self.learner = group.rank
        self.__ray_call__ = self

    def remote(self, function: Any, *arguments: Any) -> Any:
        """Call a function with the actor, and with the values of references."""
        return function(self, *(argument.value for argument in arguments))


class LocalRanks(RayLearnerGroup):
    """A learner with one rank, whose batches take the way of a run on Ray."""

    def __init__(self, group: LocalLearnerGroup) -> None:
        self._group_in_process = group
        self._actors = [LocalActor(group)]
        self._layouts, self._name, self._is_ready = [RankLayout(0, None)], "learner", True

    def _check_usable(self) -> None:
        """It is never lost."""

    def _results(self, refs: Any, *options: Any, **named_options: Any) -> list[Any]:
        return list(refs)

    def __getattribute__(self, name: str) -> Any:
        """Take all but the road of batches from the learner in this process."""
        if name in {"train_step", "__class__"} or name.startswith("_"):
            return super().__getattribute__(name)
        if name in {"ready", "check"}:
            return lambda: None
        return getattr(super().__getattribute__("_group_in_process"), name)


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
) -> LocalRanks:
    """Load the learner; takes the place of `agentrl.cluster.learner_group.start_learners`."""
    return LocalRanks(LocalLearnerGroup(model, learner, algo, seed=seed, reference=reference))


@dataclass(frozen=True)
class LocalReference:
    """A reference to a value in the object store."""

    value: Any


class LocalRay:
    """The object store of Ray: values stay where they are."""

    @staticmethod
    def put(value: Any) -> LocalReference:
        """Return a reference to the value."""
        return LocalReference(value)


def use_local_ranks() -> None:
    """Let runs of this process take these learners."""
    rank_actors.ray = LocalRay  # type: ignore[assignment]
    run_cluster.start_learners = start_learners  # type: ignore[assignment]
    run.draw_curve = lambda *arguments: None  # type: ignore[assignment]
