"""What the driver computes for each source of a mixed run: advantages, the critic's batches, metrics, replay."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from agentrl.algo.estimate import RowAdvantages, mean_advantages
from agentrl.algo.registry import compares_groups
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout, RowKey
from agentrl.obs.rollouts import read_rollouts
from agentrl.testing import FakeLearner
from agentrl.train.step_metrics import source_metrics, value_metrics
from agentrl.train.step_scores import StepScores, score_rollouts
from tests.batches import step_settings, training_step
from tests.unit.train.test_replay import config as plain
from tests.unit.train.test_replay import groups, rollout, samples_file
from tests.unit.train.test_trainer import steps, trainer

OF_GAE = ("algo.advantage.options={lam: 1.0, normalise: false}", "algo.advantage.name=gae")


def mixed(*overrides: str) -> Config:
    return plain("sources.math={}", "sources.search={}", *overrides)


def step() -> list[Rollout]:
    """Two groups of each source: rewards 0 and 1 in those of math, 0 and 3 in one of search and 2 in all of the other."""
    actual_groups = groups("math/1", "search/1", "math/2")
    actual_groups += [rollout("search/2", sample, 2.0) for sample in range(2)]
    for one in actual_groups:
        if one.prompt_id == "search/1":
            one.reward *= 3
    return actual_groups


def of(name: str, rollouts: list[Rollout]) -> RolloutGroups:
    return group_rollouts(rollout for rollout in rollouts if rollout.prompt_id.startswith(f"{name}/"))


def test_each_source_has_the_advantages_that_it_would_have_alone() -> None:
    settings = {
        "math": ("advantage.name=rloo", "overlong={max_tokens: 8, buffer_tokens: 4}"),
        "search": ("advantage.name=reinforce_plus_plus_baseline", "loss.name=gspo"),
    }
    run_config = mixed(
        *(f"sources.{name}.algo.{override}" for name, setting in settings.items() for override in setting)
    )
    actual = training_step(run_config, group_rollouts(step())).advantages
    expected: RowAdvantages = {}
    for name, setting in settings.items():
        expected |= training_step(plain(*(f"algo.{override}" for override in setting)), of(name, step())).advantages
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[key], expected[key]) for key in expected)
    together = training_step(
        plain("algo.advantage.name=reinforce_plus_plus_baseline"), group_rollouts(step())
    ).advantages
    assert mean_advantages(actual) != mean_advantages(together)


def test_a_source_without_rollouts_in_a_step_is_left_out() -> None:
    run_config = mixed("sources.search.algo.advantage.name=reinforce_plus_plus")
    alone = of("math", step())
    advantages = training_step(run_config, alone).advantages
    assert {key.prompt_id for key in advantages} == {"math/1", "math/2"}
    assert training_step(run_config, group_rollouts([])).advantages == {}
    assert not any("search" in key for key in source_metrics(run_config.sources, list(alone.rollouts_N), advantages))


def test_the_critic_learns_from_the_sources_that_need_it() -> None:
    run_config = mixed(*(f"sources.math.{override}" for override in OF_GAE), "algo.critic.warmup_steps=1")
    assert step_settings(run_config).needs_scores
    everything = group_rollouts(step())
    scores = StepScores(values={row.key: np.full(len(row.mask), 0.5, np.float32) for row in everything.rows})
    returns = training_step(run_config, everything, scores).returns
    assert {key.prompt_id for key in returns} == {"math/1", "math/2"}
    [batch] = training_step(run_config, everything, scores).value_batches()
    assert {key.prompt_id for micro in batch.micro[0] for key in micro.keys} == {"math/1", "math/2"}
    alone = plain(*OF_GAE)
    [expected] = training_step(alone, of("math", step()), scores).value_batches()
    assert sum(float(micro.weight_L.sum()) for micro in batch.micro[0]) == pytest.approx(
        sum(float(micro.weight_L.sum()) for micro in expected.micro[0])
    )
    exact = value_metrics([], everything, returns, returns)
    assert exact == {"train/value_explained_variance": 1.0}
    search = of("search", step())
    assert training_step(run_config, search, scores).returns == {}
    assert training_step(run_config, search, scores).value_batches() == []
    assert value_metrics([], search, scores.values, {}) == {}


class Critic:
    """Values every token of a batch at 0.5."""

    def values(self, batch: GlobalBatch) -> dict[RowKey, NDArray[np.float32]]:
        micros = [micro for share in batch.micro for micro in share]
        return {key: np.full(12, 0.5, np.float32) for micro in micros for key in micro.keys}


def test_only_rollouts_of_such_sources_are_valued() -> None:
    run_config, learner = mixed("sources.math.algo.advantage.name=gae"), FakeLearner()
    scores = score_rollouts(step_settings(run_config), group_rollouts(step()), learner, Critic())
    assert {key.prompt_id for key in scores.values} == {"math/1", "math/2"}
    assert score_rollouts(step_settings(run_config), of("search", step()), learner, Critic()).values == {}


def test_metrics_by_source() -> None:
    run_config, rollouts = mixed(), step()
    rollouts[0].metrics["exact_match"] = 1.0
    rollouts[1].dropped = True
    everything = group_rollouts(rollouts)
    actual_source_metrics = source_metrics(
        run_config.sources, rollouts, training_step(run_config, everything).advantages
    )
    assert actual_source_metrics["train/math/reward"] == pytest.approx(0.5)
    assert actual_source_metrics["train/search/reward"] == pytest.approx((3 + 2 + 2) / 3)
    assert actual_source_metrics["train/search/flat_groups"] == 1.0
    assert (actual_source_metrics["rollout/math/dropped"], actual_source_metrics["rollout/search/dropped"]) == (
        0.0,
        1.0,
    )
    assert (actual_source_metrics["batch/math/live_share"], actual_source_metrics["batch/search/live_share"]) == (
        1.0,
        0.0,
    )
    assert actual_source_metrics["rollout/math/exact_match"] == 1.0
    assert not any(key.startswith("time/") for key in actual_source_metrics)
    assert source_metrics({}, rollouts, {}) == {}


def test_a_replayed_run_is_mixed_as_it_was_recorded(tmp_path: Path) -> None:
    run_config, learner = mixed("sources.search.algo.loss.name=gspo"), FakeLearner(metrics={"train/loss": 1.0})
    recorded = groups("math/1", "search/1", "math/2", "search/2")
    asyncio.run(trainer(tmp_path, run_config, learner, rollouts=recorded).run())
    assert [row["train/search/reward"] for row in steps(tmp_path)] == [0.5, 0.5]
    assert {number for batch in learner.batches for micro in batch.micro[0] for number in micro.sources} == {0, 1}
    again = read_rollouts(samples_file(tmp_path, recorded, "again.jsonl"))
    assert [rollout.prompt_id for rollout in again] == [rollout.prompt_id for rollout in recorded]


def test_recorded_tasks_of_no_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a' is of none of the run's sources \(math, search\)"):
        assert training_step(mixed(), group_rollouts(groups("a"))).advantages


def test_that_nothing_is_trained_is_explained_by_all_estimators() -> None:
    flat = [replace(rollout, reward=1.0) for rollout in step()]
    settings = ("sources.math.algo.advantage.name=reinforce_plus_plus", "rollout.n_samples_per_prompt=1")
    assert compares_groups(mixed().algo)
    assert not compares_groups(mixed(*settings).algo)
    assert "equal rewards" in training_step(load_config(None, ["sources.math={}"]), flat).why_untrained()
    assert "equal rewards" in training_step(mixed(*settings), flat).why_untrained()
