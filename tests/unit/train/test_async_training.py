"""Asynchronous training in virtual time: the bound on the age of tokens, equality at staleness 0, resume, failures."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.errors import ConfigError, EngineError, LearnerError, RunStopped
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job, TaskJobs
from agentrl.learner.checkpoints import load_state
from agentrl.obs.rollouts import read_advantages, read_rollouts, rollout_files
from agentrl.testing import FakeLearner
from agentrl.train.evaluations import Evaluator
from tests.unit.train.async_world import Engines, Plain, World, make_config, steps, train


def written(folder: Path) -> dict[int, list[Rollout]]:
    return {step: read_rollouts(path) for step, path in rollout_files(folder).items()}


def ages(folder: Path) -> list[int]:
    """The age of the oldest token of each step."""
    oldest = {
        step: min(
            int(row.versions[row.mask == 1].min())
            for rollout in step_rollouts
            for row in rollout.rows
            if row.mask.any()
        )
        for step, step_rollouts in written(folder).items()
    }
    return [step - 1 - version for step, version in oldest.items()]


def counted(folder: Path) -> Counter[str]:
    """How often each rollout was trained."""
    return Counter(rollout.rollout_id for step_rollouts in written(folder).values() for rollout in step_rollouts)


ALL = Counter(f"{step}/{offset}/{sample}" for step in range(1, 13) for offset in range(4) for sample in range(2))


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_no_token_is_older_than_the_bound(tmp_path: Path, staleness: int) -> None:
    train(tmp_path, make_config("train.steps=12", f"async.max_staleness={staleness}"), seed=staleness)
    actual = ages(tmp_path)
    assert len(actual) == 12
    assert max(actual) == staleness, "the bound is used, and kept"
    assert counted(tmp_path) == ALL
    rows = steps(tmp_path)
    assert [row["async/staleness_max"] for row in rows] == actual
    assert all(row["async/staleness_mean"] <= row["async/staleness_p95"] <= row["async/staleness_max"] for row in rows)
    assert {"async/running_episodes", "async/finished_groups", "async/staleness_longest"} <= rows[0].keys()


@pytest.mark.parametrize("every", [2, 4])
def test_the_bound_holds_if_not_every_version_is_synced(tmp_path: Path, every: int) -> None:
    engines = Engines(every)
    settings = ["train.steps=12", "async.max_staleness=3", f"weights.sync_every={every}"]
    train(tmp_path, make_config(*settings), seed=every, engines=engines)
    pushed = [event for event in engines.paused if event.startswith("push")]
    assert pushed == [f"push {version}" for version in range(0, 13, every)]
    assert max(ages(tmp_path)) == 3
    assert counted(tmp_path) == ALL
    with pytest.raises(ConfigError, match=r"weights\.sync_every=5.* to 4 or less"):
        make_config("async.max_staleness=3", "weights.sync_every=5")


@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_streamed_groups_are_trained_while_others_are_sampled(tmp_path: Path, staleness: int) -> None:
    engines, running = Engines(staleness), []

    class Learner(FakeLearner):
        def train_step(self, batch: GlobalBatch) -> dict[str, float]:
            if not batch.completes:
                running.append(engines.running)
            return super().train_step(batch)

    settings = [
        "async.streaming=true",
        f"async.max_staleness={staleness}",
        "batch.tokens_per_micro=40",
        "train.steps=12",
    ]
    learner = Learner()
    train(tmp_path, make_config(*settings), learner=learner, engines=engines)
    assert max(running) > 0, "episodes run meanwhile"
    assert max(ages(tmp_path)) == staleness
    assert counted(tmp_path) == ALL
    weights, keys, trained = 0.0, set(), []
    for batch in learner.batches:
        micros = [micro for share in batch.micro for micro in share]
        weights += sum(float(micro.weight_L.sum()) for micro in micros)
        keys |= {key.rollout_id for micro in micros for key in micro.keys}
        if batch.completes:
            assert weights * batch.gradient_scale == pytest.approx(1, rel=1e-6), "all parts of a step have the sum 1"
            trained.append(keys)
            weights, keys = 0.0, set()
    live = [read_advantages(tmp_path / "rollouts", step + 1) for step in range(12)]
    assert trained == [
        {rollout_name for rollout_name, advantage in by_rollout.items() if advantage}
        for by_rollout in live
        if any(by_rollout.values())
    ]
    shares = [row["async/early_share"] for row in steps(tmp_path)]
    assert max(shares) > 0.3
    assert all(0 <= share <= 1 for share in shares)


def test_a_learner_that_takes_a_step_for_each_part_is_refused(tmp_path: Path) -> None:
    class Hasty(FakeLearner):
        def train_step(self, batch: GlobalBatch) -> dict[str, float]:
            super().train_step(batch)
            return {"loss": 0.0}

    config = make_config("async.streaming=true", "async.max_staleness=1", "batch.tokens_per_micro=40", "train.steps=3")
    with pytest.raises(LearnerError, match=r"async\.streaming=false"):
        train(tmp_path, config, learner=Hasty())


def same(actual: Any, expected: Any) -> bool:
    if isinstance(actual, torch.Tensor | np.ndarray):
        return bool((actual == expected).all())
    return bool(actual == expected)


def fields(batch: GlobalBatch) -> list[Any]:
    return [getattr(micro, name) for share in batch.micro for micro in share for name in micro.__slots__]


def test_staleness_0_is_the_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    config = make_config("train.steps=4")
    learners = {"plain": FakeLearner(), "scheduler": FakeLearner()}
    for kind, name in ((Plain, "plain"), (World, "scheduler")):
        train(tmp_path / name, config, kind=kind, learner=learners[name])
    batches = [[fields(batch) for batch in learner.batches] for learner in learners.values()]
    assert len(batches[0]) == len(batches[1]) == 4
    for first, second in zip(*batches, strict=True):
        assert len(first) == len(second) > 0
        assert all(map(same, first, second))
    rows = [
        [{key: value for key, value in row.items() if not key.startswith("time/")} for row in steps(folder)]
        for folder in (tmp_path / "plain", tmp_path / "scheduler")
    ]
    assert rows[0] == rows[1]
    for step, step_rollouts in written(tmp_path / "plain").items():
        second = written(tmp_path / "scheduler")[step]
        assert sorted(first.rollout_id for first in step_rollouts) == sorted(first.rollout_id for first in second)
        assert read_advantages(tmp_path / "plain" / "rollouts", step) == read_advantages(
            tmp_path / "scheduler" / "rollouts", step
        )
    states = [load_state(tmp_path / name / "checkpoints/step_000004") for name in learners]
    assert all(states[0][key] == states[1][key] for key in states[0] if key not in ("spent_s", "random"))


@pytest.mark.parametrize("resumed_with", [0, 2])
def test_a_resumed_run_trains_every_group_once(tmp_path: Path, resumed_with: int) -> None:
    config = make_config("train.steps=12", "async.max_staleness=5")
    for done, end in ((0, 3), (3, 7)):
        with pytest.raises(LearnerError):
            train(tmp_path, config, seed=4 * end, learner=FakeLearner(fail_at=end - done))
    ahead = json.loads((tmp_path / "checkpoints/step_000007/state.json").read_text())["trained_ahead"]
    assert ahead, "some groups were trained before others that began earlier"
    run = train(tmp_path, make_config("train.steps=12", f"async.max_staleness={resumed_with}"), seed=9)
    assert run.step == 12
    tasks = Counter(rollout.prompt_id for step_rollouts in written(tmp_path).values() for rollout in step_rollouts)
    assert set(tasks.values()) == {2}, "48 of the 50 tasks, each with its two samples"
    assert len(tasks) == 48
    assert (run.position.first, run.position.ahead) == (48, ())


@pytest.mark.parametrize(("state_before", "state_after"), [(2, 4), (4, 2)])
def test_names_stay_unique_if_a_resumed_run_has_another_batch_size(
    tmp_path: Path, state_before: int, state_after: int
) -> None:
    settings = ["train.steps=12", "async.max_staleness=1"]
    for size, trained in ((state_before, 6), (state_after, 2)):
        with pytest.raises(LearnerError):
            train(tmp_path, make_config(*settings, f"rollout.batch_size={size}"), learner=FakeLearner(fail_at=trained))
    train(tmp_path, make_config(*settings, f"rollout.batch_size={state_after}"))
    groups = {
        rollout.rollout_id.rpartition("/")[0]
        for step_rollouts in written(tmp_path).values()
        for rollout in step_rollouts
    }
    first, remaining_tasks = 7 * state_before, 5 * state_after  # the seventh step failed, with its batch in the journal
    assert counted(tmp_path).total() == len(counted(tmp_path)) == 2 * (first + remaining_tasks)
    assert groups == {f"{at // state_before + 1}/{at % state_before}" for at in range(first + remaining_tasks)}


def test_an_evaluation_has_the_newest_weights(tmp_path: Path) -> None:
    config = make_config("train.steps=3", "async.max_staleness=3", "train.eval_every=1", "eval.save_rollouts=true")
    train(tmp_path, config)
    for step in (1, 2, 3):
        rollouts = read_rollouts(tmp_path / "rollouts" / f"eval_{step:06d}.jsonl")
        assert len(rollouts) == 3
        assert {int(v) for rollout in rollouts for row in rollout.rows for v in row.versions[row.versions >= 0]} == {
            step
        }
    assert max(ages(tmp_path)) <= 3


def test_a_failure_in_the_background_reaches_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = TaskJobs.group

    def group_until_13(jobs: TaskJobs, position: int) -> list[Job]:
        if position == 13:
            raise RunStopped("the task stream has ended")
        return group(jobs, position)

    monkeypatch.setattr(TaskJobs, "group", group_until_13)
    with pytest.raises(RunStopped, match="has ended"):
        train(tmp_path, make_config("train.steps=12", "async.max_staleness=2"))
    assert 0 < len(steps(tmp_path)) < 12
    assert (tmp_path / "checkpoints" / f"step_{len(steps(tmp_path)):06d}").exists()


@pytest.mark.parametrize("mode", ["abort", "restart", "in_place", "finish"])
def test_engines_pause_for_a_sync_while_episodes_run(tmp_path: Path, mode: str) -> None:
    engines = Engines(0)
    engines.refused = 2
    with pytest.raises(EngineError, match="no memory"):
        train(tmp_path, make_config("async.max_staleness=1", f"weights.pause={mode}"), engines=engines)
    if mode == "finish":
        assert engines.paused == ["push 0", "push 1", "push 2"]
    else:
        assert engines.paused == ["push 0", mode, "push 1", "resume", mode, "push 2", "resume"], (
            "they go on after a failure"
        )
    assert {"time/pause_s", "time/sync_s"} & steps(tmp_path)[0].keys() == (
        {"time/sync_s"} if mode == "finish" else {"time/pause_s", "time/sync_s"}
    )


@pytest.mark.parametrize("filters", ["[]", "[zero_variance]"])
def test_in_a_synchronous_run_nothing_is_sampled_between_two_steps(tmp_path: Path, filters: str) -> None:
    engines, calls = Engines(0), 0

    async def check_idle() -> None:
        nonlocal calls
        await asyncio.sleep(0.1)
        assert engines.running == 0
        calls += 1

    class Quiet(World):
        async def sync_weights(self, *arguments: Any) -> None:
            await check_idle()
            await World.sync_weights(self, *arguments)
            await check_idle()

        async def release_gpus_for_training(self, *arguments: Any) -> None:
            await check_idle()
            await World.release_gpus_for_training(self, *arguments)

    class QuietEvaluator(Evaluator):
        async def begin(self) -> None:
            await check_idle()
            await Evaluator.begin(self)

    config = make_config("train.steps=2", "train.eval_every=1", f"rollout.filter_groups.filters={filters}")
    train(tmp_path, config, kind=Quiet, engines=engines, evaluator=QuietEvaluator)
    assert (engines.paused, calls) == (["push 0", "push 1", "push 2"], 10), "and no engine is paused"


def test_a_synchronous_run_may_sync_less_often_and_replace_filtered_groups(tmp_path: Path) -> None:
    engines = Engines(0)
    config = make_config("train.steps=4", "weights.sync_every=2", "rollout.filter_groups.filters=[zero_variance]")
    train(tmp_path, config, engines=engines)
    assert engines.paused == ["push 0", "push 2", "push 4"]
    assert ages(tmp_path) == [0, 1, 0, 1]


def test_a_synchronous_run_writes_rollouts_as_they_end(tmp_path: Path) -> None:
    """They can be viewed before the step ends, and stay if the run is killed."""
    engines = Engines(0)

    class Fails(World):
        def _write_finished(self, rollout: Rollout) -> None:
            World._write_finished(self, rollout)
            if sum(counted(tmp_path).values()) == 10:
                raise RunStopped("enough")

    with pytest.raises(RunStopped, match="enough"):
        train(tmp_path, make_config("train.steps=4"), kind=Fails, engines=engines)
    assert {step: len(step_rollouts) for step, step_rollouts in written(tmp_path).items()} == {1: 8, 2: 2}


def test_the_same_samples_are_trained_in_less_time(tmp_path: Path) -> None:
    """Latencies have a long tail; a batch has 8 episodes."""

    class Timed(World):
        async def sync_weights(self, learner: Any, version: int, watch: Any) -> None:
            await World.sync_weights(self, learner, version, watch)
            ends[version] = asyncio.get_running_loop().time()

    seconds = {}
    for staleness in (0, 1, 4):
        ends: dict[int, float] = {}
        config = make_config("train.steps=8", f"async.max_staleness={staleness}", "rollout.concurrency=40")
        train(tmp_path / str(staleness), config, kind=Timed)
        seconds[staleness] = ends[8] - ends[0]
    assert seconds[0] / seconds[1] > 1.3
    assert seconds[0] / seconds[4] > 2.2


def test_old_tokens_are_masked_if_the_configuration_says_so(tmp_path: Path) -> None:
    train(tmp_path, make_config("train.steps=8", "async.max_staleness=4", "async.mask_older_than=3"), seed=4)
    assert max(ages(tmp_path)) == 3, "of the trained tokens"
    rows = steps(tmp_path)
    assert max(row["async/staleness_max"] for row in rows) == 4, "before masking"
    assert 0 < max(row["async/masked_share"] for row in rows) < 1
    assert len(counted(tmp_path)) == 64, "all episodes are still taken"
