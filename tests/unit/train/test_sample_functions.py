"""Sample conversion and reward post-processing in training runs: what they change is trained, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agentrl import Rollout, TrainingSample
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.obs.rollouts import read_rollouts, rollout_files
from tests.unit.train.async_world import make_config, steps, train


def first_of_each_task(samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    """Leave out the second sample of each task, and mask the last token of the others."""
    chosen = {sample.rollout.prompt_id: sample for sample in reversed(samples)}
    for sample in chosen.values():
        for row in sample.rows:
            row.mask_T[row.mask_T.nonzero()[0][-1:]] = False
    return [*chosen.values()]


def nothing(samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    return samples[:0]


def ten_times(groups: Sequence[Sequence[Rollout]]) -> Mapping[str, float]:
    """Ten times each reward."""
    return {rollout.rollout_id: 10 * rollout.reward for group in groups for rollout in group}


def missing(groups: Sequence[Sequence[Rollout]]) -> Mapping[str, float]:
    return {}


def config(*settings: str) -> Config:
    return make_config("train.steps=2", *settings)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_trains_what_the_conversion_returns(tmp_path: Path, staleness: int) -> None:
    options = ["algo.advantage.name=reward", f"async.max_staleness={staleness}"]
    train(tmp_path, config(f"batch.convert={__name__}:first_of_each_task", *options))
    for row in steps(tmp_path):
        assert row["batch/convert/dropped"] == 4
        assert row["rollout/episodes"] == 8
        assert row.get("batch/rows", 0) <= 4
        assert row["batch/convert/masked_share"] > 0
    for path in rollout_files(tmp_path).values():
        assert len(read_rollouts(path)) == 8, "the files have what was sampled"


def test_advantages_are_computed_from_processed_rewards(tmp_path: Path) -> None:
    train(tmp_path, config(f"algo.reward_post_process={__name__}:ten_times", "algo.advantage.name=reward"))
    for row in steps(tmp_path):
        assert row["train/processed_reward"] == pytest.approx(10 * row["train/reward"])


def test_a_conversion_that_leaves_nothing_skips_the_step_and_says_so(
    tmp_path: Path,
) -> None:
    run = train(tmp_path, config(f"batch.convert={__name__}:nothing"))
    assert [row["train/skipped"] for row in steps(tmp_path)] == [1, 1]
    assert run.step == 2


def test_a_broken_function_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"algo\.reward_post_process=.*:missing returned no reward for rollout '1/0/0'"
    ):
        train(tmp_path, config(f"algo.reward_post_process={__name__}:missing"))
