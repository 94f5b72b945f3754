"""Evaluations that run while the trainer goes on, in virtual time: results, lag, goals, best checkpoints, failures, resume."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.engine_checks import check_placement
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, EngineError, LearnerError, RunStopped
from agentrl.learner.checkpoints import complete_checkpoints, read_state
from agentrl.obs.metrics import read_metrics
from agentrl.obs.rollouts import read_rollouts
from agentrl.testing import FakeLearner
from agentrl.train.engine_weights import EngineWeights, EvalEngines
from agentrl.train.evaluations import Evaluator
from agentrl.train.trainer import Trainer
from tests.unit.train.async_world import Engines, fleet_of, make_config, steps, sync_of, train


def background(*overrides: str) -> Config:
    return make_config("eval.background=true", "train.eval_every=2", *overrides)


def evaluations(folder: Path) -> list[dict[str, float]]:
    """The rows of evaluations, as they were written."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if "time/eval_s" in row]


class Scripted(Evaluator):
    """Evaluations that take seconds of virtual time, and give the policy of each step a rating."""

    def __init__(self, seconds: float, ratings: Mapping[int, float | Exception]) -> None:
        """Take so many ``seconds``; the rating of other steps is 0, and an exception is raised."""
        self.sets: Any = (SimpleNamespace(episodes=1),)
        self.seconds = seconds
        self.ratings = ratings
        self.begun: list[int] = []
        self.ended = 0.0
        """When the last has ended, on the loop's clock."""
        self.standing = {"eval/rating": 0.0}

    def of_run(self, *arguments: Any) -> Evaluator:
        """Return it with the weights of a run."""
        [self.weights] = [argument for argument in arguments if isinstance(argument, EngineWeights)]
        return self

    async def begin(self) -> None:
        """Measure nothing."""
        await self.weights.sync_for_evaluation()

    async def evaluate(self, step: int, on_done: Any) -> list[Any]:
        """Measure the policy after a step."""
        self.begun.append(step)
        await asyncio.sleep(self.seconds)
        rating = self.ratings.get(step, 0.0)
        if isinstance(rating, Exception):
            raise rating
        self.standing, self.ended = {"eval/rating": rating}, asyncio.get_running_loop().time()
        return []


def scripted(folder: Path, config: Config, evaluator: Scripted, learner: FakeLearner | None = None) -> Trainer:
    return train(folder, config, learner=learner, evaluator=evaluator.of_run)


@pytest.mark.parametrize("staleness", [0, 2])
def test_training_waits_only_for_the_last_evaluation(tmp_path: Path, staleness: int) -> None:
    seconds = {}
    for name, changes in {
        "only the last": ["train.eval_every=0"],
        "background": [],
        "waits": ["eval.background=false"],
    }.items():
        run_config = background("train.steps=6", f"async.max_staleness={staleness}", *changes)
        evaluator = Scripted(4.0, {})
        scripted(tmp_path / name, run_config, evaluator)
        seconds[name] = evaluator.ended
        assert [row["step"] for row in evaluations(tmp_path / name)] == [2, 4, 6] or name == "only the last"
    assert seconds["background"] == pytest.approx(seconds["only the last"])
    if not staleness:
        assert seconds["waits"] > seconds["background"] + 4


def test_the_rows_have_the_lag_of_tokens_in_versions(tmp_path: Path) -> None:
    train(tmp_path, background("train.steps=5", "async.max_staleness=2", "eval.save_rollouts=true"))
    rows = evaluations(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 5]
    for row in rows:
        rollouts = read_rollouts(tmp_path / "rollouts" / f"eval_{int(row['step']):06d}.jsonl")
        newest = max(int(row.versions[row.mask == 1].max()) for rollout in rollouts for row in rollout.rows)
        assert row["eval/lag_max"] == newest - row["step"]
        assert 0 <= row["eval/lag_mean"] <= row["eval/lag_max"] <= row["eval/lag_steps"]
    assert max(row["eval/lag_max"] for row in rows) > 0
    assert rows[-1]["eval/lag_max"] == 0, "the final weights stay"


def test_engines_pause_for_a_sync_also_if_only_an_evaluation_runs(tmp_path: Path) -> None:
    engines = Engines(0)
    engines.latency.lognormvariate = lambda mean, deviation: 8.0  # type: ignore[method-assign]
    train(tmp_path, background("train.steps=3"), engines=engines)
    assert engines.paused == ["push 0", "push 1", "push 2", "abort", "push 3", "resume"]


def test_engines_that_only_evaluate_keep_the_weights_of_the_evaluation(tmp_path: Path) -> None:
    engines, other_engines = Engines(0), Engines(1)

    run_config = background("train.steps=5", "train.eval_every=3", "async.max_staleness=1")
    train(
        tmp_path, run_config, engines=engines, eval_engines=EvalEngines(fleet_of(other_engines), sync_of(other_engines))
    )
    assert other_engines.paused == ["push 3", "push 5"]
    rows = evaluations(tmp_path)
    assert [(row["step"], row["eval/lag_max"]) for row in rows] == [(3, 0), (5, 0)]
    assert rows[0]["eval/lag_steps"] > 0
    metrics = {name: value for name, value in rows[0].items() if "engine" in name}
    assert metrics == {"engines/eval/restarts": 1.0, "engines/eval/cache_hit": 0.5}
    assert engines.paused.count("push 4") == 1


def test_one_evaluation_runs_at_a_time(tmp_path: Path) -> None:
    evaluator = Scripted(1000.0, {})
    scripted(tmp_path, background("train.steps=6", "async.max_staleness=1"), evaluator)
    rows = evaluations(tmp_path)
    assert [(row["step"], row["eval/lag_steps"]) for row in rows] == [(2, 2), (4, 2), (6, 0)]


def test_a_goal_that_is_reached_ends_the_run_with_an_evaluation_of_its_last_policy(tmp_path: Path) -> None:
    run_config = background("train.steps=9", "train.stop_at={rating: 4}")
    run = scripted(tmp_path, run_config, Scripted(0.1, {4: 5.0}))
    assert run.step == 5
    assert [(row["step"], row["eval/rating"]) for row in evaluations(tmp_path)] == [(2, 0.0), (4, 5.0), (5, 0.0)]


@pytest.mark.parametrize("best", [2, 4, 8])
def test_the_checkpoint_of_the_best_policy_is_kept_until_its_result_and_after(tmp_path: Path, best: int) -> None:
    """Two newer checkpoints are written meanwhile."""
    evaluator = Scripted(60.0, {best: 5.0})
    result = background(
        "train.steps=8", "train.keep_best=rating", "train.eval_every=4" if best == 4 else "train.eval_every=2"
    )
    scripted(tmp_path, result, evaluator)
    kept_checkpoints = complete_checkpoints(tmp_path / "checkpoints")
    assert {path.name for path in kept_checkpoints} == {f"step_{step:06d}" for step in {best, 7, 8}}
    assert [
        (state["score"], state["evaluated"]) for state in map(read_state, kept_checkpoints) if state["score"] == 5.0
    ] == [(5.0, best)]


def test_the_policy_of_an_evaluation_is_saved_if_it_may_be_the_best(tmp_path: Path) -> None:
    run_config = background("train.steps=5", "train.keep_best=rating", "train.save_every=0")
    scripted(tmp_path, run_config, Scripted(1.0, {2: 5.0}))
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == [
        f"step_{step:06d}" for step in (2, 4, 5)
    ]


@pytest.mark.parametrize("step", [2, 6])
def test_the_failure_of_an_evaluation_ends_the_run_and_a_resume_evaluates_again(tmp_path: Path, step: int) -> None:
    run_config = background("train.steps=6", "train.save_every=2")
    with pytest.raises(EngineError, match="no engine is left"):
        scripted(tmp_path, run_config, Scripted(0.1, {step: EngineError("no engine is left")}))
    assert step not in [row["step"] for row in evaluations(tmp_path)]
    again = Scripted(0.1, {})
    scripted(tmp_path, run_config, again)
    assert again.begun == ([4, 6] if step == 2 else [6])


def test_an_evaluation_that_a_stop_cuts_is_reported_and_run_again_from_its_checkpoint(tmp_path: Path) -> None:
    run_config = background("train.steps=6", "train.save_every=2", "train.eval_every=4")
    first = Scripted(1000.0, {})
    with pytest.raises(LearnerError):
        scripted(tmp_path, run_config, first, FakeLearner(fail_at=4))
    assert first.begun == [4]
    assert not evaluations(tmp_path)
    again = Scripted(0.1, {})
    scripted(tmp_path, run_config, again)
    assert again.begun == [4, 6]


def test_an_evaluation_whose_result_came_after_its_checkpoint_is_not_repeated(tmp_path: Path) -> None:
    run_config = background("train.steps=6", "train.save_every=4", "train.eval_every=4")
    with pytest.raises(LearnerError):
        scripted(tmp_path, run_config, Scripted(0.1, {4: 3.0}), FakeLearner(fail_at=5))
    again = Scripted(0.1, {})
    scripted(tmp_path, run_config, again)
    assert again.begun == [6]
    assert [row["step"] for row in evaluations(tmp_path)] == [4, 6]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler\.groups\.eval\.serves=evaluation without eval\.background"):
        load_config(None, ["sampler.groups.eval.serves=evaluation"])
    with pytest.raises(ConfigError, match=r"placement\.mode=colocate with eval\.background=true"):
        check_placement(load_config(None, ["placement.mode=colocate", "eval.background=true"]), "cpu")


def test_the_policy_is_stopped_by_the_failure_policy_of_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="too many"):
        scripted(tmp_path, background("train.steps=4"), Scripted(1.0, {4: RunStopped("too many failed")}))
    assert len(steps(tmp_path)) == 4
