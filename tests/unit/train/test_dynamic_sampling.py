"""Dynamic sampling in virtual time: filters, replacements, over-sampling, the limit, resume, and the bias by length."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import LearnerError, RunStopped, SamplerError
from agentrl.core.types import Generation, Prompt, Rollout, SamplingParams, StopReason
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.testing import FakeLearner
from agentrl.train.pipeline.filtering import LengthBias
from tests.unit.train.async_world import Engines, make_config, steps, train

ZERO_VARIANCE = "rollout.filter_groups.filters=[zero_variance]"


def written(folder: Path) -> dict[int, tuple[list[Rollout], list[Rollout]]]:
    """By step: the rollouts that were trained, and those that were filtered."""
    by_step = {}
    for step, path in rollout_files(folder).items():
        rollouts = read_rollouts(path)
        by_step[step] = ([one for one in rollouts if not one.filtered], [one for one in rollouts if one.filtered])
    return by_step


def by_task(rollouts: list[Rollout]) -> dict[str, set[float]]:
    """The rewards of each task."""
    rewards_by_task: dict[str, set[float]] = {}
    for rollout in rollouts:
        rewards_by_task.setdefault(rollout.prompt_id, set()).add(rollout.reward)
    return rewards_by_task


def ages(folder: Path) -> list[int]:
    return [
        step - 1 - min(int(row.versions[row.mask == 1].min()) for rollout in trained for row in rollout.rows)
        for step, (trained, _) in written(folder).items()
    ]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_each_batch_is_full_of_groups_that_pass(tmp_path: Path, staleness: int) -> None:
    run = train(tmp_path, make_config("train.steps=6", f"async.max_staleness={staleness}", ZERO_VARIANCE))
    rows, count, tasks = steps(tmp_path), 0, []
    for row, (trained, filtered) in zip(rows, written(tmp_path).values(), strict=True):
        assert [len(rewards) for rewards in by_task(trained).values()] == [2] * 4, "4 groups, rewards differ"
        assert all(len(rewards) == 1 for rewards in by_task(filtered).values())
        assert all(rollout.dropped and rollout.filtered == "zero_variance" for rollout in filtered)
        assert row["rollout/episodes"] == 8
        assert row["train/flat_groups"] == row["rollout/dropped"] == 0
        assert row["rollout/filtered_groups"] == len(filtered) / 2
        assert row["train/taught_groups"] == pytest.approx(4 / (4 + len(filtered) / 2))
        assert row.get("rollout/filtered/zero_variance", 0) == len(filtered) / 2
        count += len(filtered) // 2
        tasks += [*by_task(trained), *by_task(filtered)]
    assert count > 0
    assert run.position.first + len(run.position.ahead) == 24 + count, "filtered groups are consumed"
    assert len(tasks) == 24 + count
    assert max(ages(tmp_path)) <= staleness


def test_without_staleness_the_batches_do_not_depend_on_latencies(tmp_path: Path) -> None:
    config = make_config("train.steps=3", ZERO_VARIANCE)
    for seed in (0, 1):
        train(tmp_path / str(seed), config, seed=seed)
    slow_run, fast_run = (
        [
            [[(rollout.rollout_id, rollout.reward) for rollout in step_part] for step_part in step]
            for step in written(tmp_path / str(seed)).values()
        ]
        for seed in (0, 1)
    )
    assert [trained for trained, _ in slow_run] == [trained for trained, _ in fast_run]
    assert [sorted(filtered) for _, filtered in slow_run] == [sorted(filtered) for _, filtered in fast_run]


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_resumed_run_samples_no_filtered_group_again(tmp_path: Path, staleness: int) -> None:
    config = make_config("train.steps=5", f"async.max_staleness={staleness}", ZERO_VARIANCE)
    with pytest.raises(LearnerError):
        train(tmp_path, config, seed=1, learner=FakeLearner(fail_at=3))
    run = train(tmp_path, config, seed=2)
    groups = [name for step in written(tmp_path).values() for step_part in step for name in by_task(step_part)]
    assert len(groups) == run.position.first + len(run.position.ahead)
    assert len({*groups}) == min(len(groups), 50), "none twice before the tasks' second epoch"


def test_over_sampled_groups_are_kept_for_later_steps(tmp_path: Path) -> None:
    mean = {}
    for most in (5, 16):
        folder, limit = tmp_path / str(most), f"rollout.over_sampling_batch_size={most}"
        train(folder, make_config("train.steps=6", "async.max_staleness=3", "rollout.concurrency=100", limit))
        ids = [rollout.rollout_id for trained, _ in written(folder).values() for rollout in trained]
        assert sorted(ids) == [f"{step}/{offset}/{n}" for step in range(1, 7) for offset in range(4) for n in range(2)]
        rows = steps(folder)
        assert all(row["async/finished_groups"] <= most for row in rows)
        mean[most] = sum(row["async/staleness_mean"] for row in rows) / 6
    assert mean[5] < mean[16], "fewer groups ahead, less staleness"


def test_long_episodes_are_trained_too(tmp_path: Path) -> None:
    """An episode takes longer with more turns, and steps take groups that have finished."""
    train(tmp_path, make_config("train.steps=6", "async.max_staleness=4", "rollout.concurrency=100"))
    bias = [row["async/length_bias"] for row in steps(tmp_path) if "async/length_bias" in row]
    assert min(bias) < 1, "short ones were trained first"
    assert bias[-1] == pytest.approx(1), "all that began were trained in the end"


class TimedEngines(Engines):
    """Know when the last request ended."""

    ended = 0.0

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Return the script's answer after a while."""
        generation = await super().generate(prompt, params, **names)
        self.ended = asyncio.get_running_loop().time()
        return generation


def test_a_step_waits_for_stragglers_up_to_a_limit(tmp_path: Path) -> None:
    seconds, passed = {}, {}
    for limit in (0, 3, 100_000):
        folder, engines = tmp_path / str(limit), TimedEngines(0)
        options = ["async.max_staleness=4", "rollout.concurrency=100", f"rollout.straggler_timeout_s={limit}"]
        train(folder, make_config("train.steps=12", *options), engines=engines)
        ids = [rollout.rollout_id for trained, _ in written(folder).values() for rollout in trained]
        assert sorted(ids) == sorted(f"{step}/{o}/{n}" for step in range(1, 13) for o in range(4) for n in range(2))
        assert max(ages(folder)) <= 4
        rows = steps(folder)
        assert rows[-1]["async/length_bias"] == pytest.approx(1), "all that began were trained in the end"
        passed[limit], seconds[limit] = sum(row["async/passed_over"] for row in rows), engines.ended
    assert passed[0] > passed[3] > passed[100_000] == 0
    assert seconds[0] < seconds[3] < seconds[100_000], "waiting takes time"
    assert [row["async/length_bias"] for row in rows] == pytest.approx([1] * 12), "in the order of tasks"


def test_the_bias_of_a_choice_by_length() -> None:
    def group(tokens: int) -> list[Rollout]:
        return [Rollout("t", "r", [], 0.0, StopReason.TERMINATED, sampled_tokens=tokens) for _ in range(2)]

    bias = LengthBias()
    bias.add({0: group(100), 2: group(20)}, trained=True)
    assert bias.metric(oldest=1) == {"async/length_bias": 0.6}, "60 trained, 100 in order; group 1 still runs"
    bias.add({1: group(180)}, trained=False)
    assert bias.metric(oldest=None) == {"async/length_bias": 0.6}, (
        "60 trained, 100 in order; a filter dropped the longest"
    )
    bias.add({3: group(280)}, trained=True)
    assert bias.metric(oldest=3)["async/length_bias"] == pytest.approx(400 / 3 / 100)
    assert LengthBias().metric(oldest=0) == {}


def test_a_run_in_which_all_is_filtered_ends(tmp_path: Path) -> None:
    limit = "rollout.filter_groups.max_num_gen_batches=3"
    config = make_config("rollout.filter_groups.filters=[all_solved]", "rollout.filter_groups.solved_reward=-1", limit)
    with pytest.raises(
        RunStopped, match=r"step 1 has no full batch: 9 groups were filtered \(all_solved 9; .*=3 batches"
    ):
        train(tmp_path, config)


class Flaky(Engines):
    """Engines that fail in the first attempt of some episodes."""

    failed = 0

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Fail or sample."""
        if names["session_id"].endswith("/1"):
            self.failed += 1
            raise SamplerError("no engine")
        return await super().generate(prompt, params, **names)


def test_a_failed_sample_is_run_again_without_its_group(tmp_path: Path) -> None:
    engines = Flaky(0)
    train(tmp_path, make_config("train.steps=3", "async.max_staleness=1"), engines=engines)
    for trained, _ in written(tmp_path).values():
        assert [rollout.dropped for rollout in trained] == [False] * 8
    begun = [request.session_id for request in engines.requests if request.turn == 0]
    sessions = [name for name in begun if not name.startswith("eval")]
    assert engines.failed == 12, "the second sample of each group"
    assert len(sessions) == len({*sessions}) == 24, "each first sample ran once"


class Broken(Engines):
    """Engines that fail in each episode."""

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Fail."""
        raise SamplerError("no engine")


def test_groups_that_failed_are_replaced_until_too_many_fail(tmp_path: Path) -> None:
    config = make_config(ZERO_VARIANCE, "rollout.failure.sampler=drop", "rollout.filter_groups.max_num_gen_batches=2")
    with pytest.raises(RunStopped, match=r"10 of 10 episodes failed for good.*SamplerError: no engine"):
        train(tmp_path, config, engines=Broken(0))
