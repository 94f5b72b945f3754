"""A process that is lost while episodes run, in virtual time: the error reaches the trainer, and nothing trained is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import LearnerError
from agentrl.obs.metrics import read_metrics
from agentrl.testing import FakeLearner
from agentrl.train.evaluations import Evaluator
from agentrl.train.rollout_source import StepRollouts, TaskPosition
from tests.unit.train.async_world import Engines, World, make_config, steps, train


class Endless(Engines):
    """Requests that began after ``stuck`` was set never end: without the check, so would the run."""

    stuck = False

    async def generate(self, *arguments: Any, **names: Any) -> Any:
        """Return an answer in time, or in ten days."""
        if self.stuck:
            self.latency.lognormvariate = lambda mu, sigma: 1e6  # type: ignore[method-assign]
        return await super().generate(*arguments, **names)


def lost() -> None:
    raise LearnerError("rank 1 of 2 was lost")


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rank_that_is_lost_ends_groups_that_would_never_complete(tmp_path: Path, staleness: int) -> None:
    engines = Endless(0)

    class Loses(World):
        async def get_rollouts(self, step: int, position: TaskPosition, consume: Any = None) -> StepRollouts:
            self.services.check = lambda: lost() if engines.stuck else None  # type: ignore[method-assign]
            engines.stuck = step == 4
            return await World.get_rollouts(self, step, position)

    config = make_config("train.steps=6", f"async.max_staleness={staleness}")
    with pytest.raises(LearnerError, match="rank 1 of 2"):
        train(tmp_path, config, kind=Loses, engines=engines)
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3]
    assert train(tmp_path, config).step == 6
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_rank_that_is_lost_in_the_last_evaluation(tmp_path: Path, staleness: int) -> None:
    """All steps are saved, and the resumed run only evaluates."""

    class Loses(Evaluator):
        async def begin(self) -> None:
            self.services.check = lost  # type: ignore[method-assign]
            await Evaluator.begin(self)

    config = make_config("train.steps=3", f"async.max_staleness={staleness}")
    with pytest.raises(LearnerError, match="rank 1 of 2"):
        train(tmp_path, config, evaluator=Loses)
    state = json.loads((tmp_path / "checkpoints/step_000003/state.json").read_text())
    assert (state["step"], state["evaluated"]) == (3, -1)
    learner = FakeLearner()
    train(tmp_path, config, learner=learner)
    assert learner.steps == 0
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 3]
