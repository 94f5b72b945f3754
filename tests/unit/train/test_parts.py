"""The small parts around the loop: task order, metrics, batches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Message, Task
from agentrl.algo.estimate import mean_advantages
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError
from agentrl.core.task import MadeTasks, TaskSet
from agentrl.core.types import ForkReason, Rollout, StopReason, ToolUse
from agentrl.data.jobs import TaskJobs, episode_seed
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import EnvTasks, read_split
from agentrl.train.step_metrics import live_share, merge_metrics, rollout_metrics
from benchmarks.episode_runner import synthetic_rows
from tests.batches import training_step

TASKS = [Task(f"t{index}", (Message("user", "?"),)) for index in range(7)]


@given(position=st.integers(0, 40), count=st.integers(1, 20), seed=st.integers(0, 5))
def test_order_depends_on_position_alone(position: int, count: int, seed: int) -> None:
    full_tasks = TaskOrder(TASKS, seed).get_samples(position + count)
    resumed = TaskOrder(TASKS, seed)
    resumed.load_state({"position": position})
    assert resumed.get_samples(count) == full_tasks[position:]


def test_every_epoch_has_every_task_once() -> None:
    order = TaskOrder(TASKS, 3)
    epochs = [order.get_samples(7) for _ in range(4)]
    assert all({task.id for task in epoch} == {task.id for task in TASKS} for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_episode_seeds_differ_and_stay() -> None:
    seeds = {episode_seed(run, "eval", task) for run in range(10) for task in range(100)}
    assert len(seeds) == 1000
    assert episode_seed(0, "eval", "t1") == 279282251


def test_a_task_has_one_reset_seed_and_each_episode_its_own_samples() -> None:
    config = load_config(None, ["rollout.batch_size=7", "rollout.n_samples_per_prompt=3"])
    tasks = TaskJobs(config, TaskOrder(TASKS, 3))
    jobs = [job for step in (1, 2) for job in tasks.groups(range(7 * step - 7, 7 * step))]
    resets: dict[str, set[int | None]] = {}
    for job in jobs:
        resets.setdefault(job.task.id, set()).add(job.reset_seed)
    assert all(len(seeds) == 1 for seeds in resets.values()), "the same in every group and epoch"
    assert len(set.union(*resets.values())) == len(TASKS)
    assert len({job.seed for job in jobs}) == len(jobs) == 42
    config = load_config(None, ["rollout.n_samples_per_prompt=3", "rollout.reset_seed=episode"])
    jobs = TaskJobs(config, TaskOrder(TASKS, 3)).groups(range(7))
    assert {job.reset_seed for job in jobs} == {None}, "each has that of its samples"


class Given(TaskSet):
    """Returns what it is given as the split ``train``, and knows no other."""

    def __init__(self, tasks: Any) -> None:
        self._splits = {"train": tasks}

    def split(self, name: str) -> Sequence[Task]:
        return self._splits[name]


class Board(Env):
    """Has tasks to train on only."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        return {"train": TASKS}[split]


@pytest.mark.parametrize(
    ("tasks", "split", "message"),
    [
        (EnvTasks(Board, 3, {}), "eval", r"^tasks\.eval_split=eval: Board\.tasks\('eval', 3\) raised KeyError: 'eval' \(test_p"),
        (EnvTasks(Board, 3, {}), "eval", r"_parts\.py:\d+\); it must return the tasks of the split, or \(\) if it has none"),
        (EnvTasks(Env, 3, {}), "eval", r"Env\.tasks\('eval', 3\) raised NotImplementedError: Env defines no tasks"),
        (Given(TASKS), "eval", r"Given\.split\('eval'\) raised KeyError: 'eval' \(test_parts\.py:\d+\)"),
        (Given(None), "train", "must return a sequence of Tasks, it returned None"),
        (Given(iter(TASKS)), "train", "it returned <list_iterator"),
        (Given({"a": TASKS[0]}), "train", "it returned {'a'"),
        (Given("tasks"), "train", "it returned 'tasks'"),
        (Given([TASKS[0], "What?"]), "train", r"it returned one with 'What\?' in it"),
    ],
)  # fmt: skip
def test_a_split_that_is_missing_or_holds_no_tasks_is_said_in_one_line(
    tasks: TaskSet, split: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read_split(tasks, split, "tasks.eval_split")
    assert "\n" not in str(raised.value)


class Made(MadeTasks):
    """Every third task has the id of the one before it."""

    def make(self, index: int) -> Task:
        return Task(f"m{index - (index % 3 == 2)}", (Message("user", "?"),))


def test_ids_that_several_tasks_have_are_refused() -> None:
    twice = [*TASKS, TASKS[2], TASKS[5], TASKS[2]]
    with pytest.raises(ConfigError, match=r"Given\.split\('train'\) .*'t2' \(tasks 2, 7, 9\), 't5' \(tasks 5, 8\)"):
        read_split(Given(twice), "train", "tasks.train_split")
    assert read_split(Given(TASKS), "train", "tasks.train_split") is TASKS
    many = [TASKS[0]] * 3 + [Task(f"x{index // 2}", ()) for index in range(40)]
    with pytest.raises(ConfigError, match="and 16 others"):
        read_split(Given(many), "train", "tasks.train_split")


def test_ids_of_tasks_made_on_access_are_compared_when_they_are_taken() -> None:
    made = Made("train", 30)
    assert read_split(Given(made), "train", "tasks.train_split") is made, "making all of them may take minutes"
    order = TaskOrder(made, 0)
    with pytest.raises(ConfigError, match=r"several tasks one id: 'm\d+' \(tasks \d+, \d+\)"):
        order.get_samples(30)
    assert len(TaskOrder(Made("train", 2), 0).get_samples(6)) == 6, (
        "a task that comes again in the next epoch is the same"
    )


def rollout(prompt: str, sample: int, reward: float, hops: int = 1) -> Rollout:
    [row] = synthetic_rows(1, 2, 5)
    key = type(row.key)(prompt, f"{prompt}/{sample}")
    row = type(row)(**{name: getattr(row, name) for name in row.__slots__} | {"key": key})
    metrics = {"exact_match": reward, "searches": 1.0}
    metadata = {"hops": hops}
    return Rollout(
        prompt, key.rollout_id, [row], reward, StopReason.TERMINATED, metrics, sampled_tokens=10, metadata=metadata
    )


def trained(config: Config, groups: RolloutGroups) -> list[set[str]]:
    """The rollouts that each optimizer step trains."""
    return [step.trained for step in training_step(config, groups).optimizer_steps()]


def test_rollouts_without_an_advantage_count_in_the_denominators_if_they_shall() -> None:
    rollouts = [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0), rollout("b", 1, 1.0)]
    groups = group_rollouts(rollouts)
    for denominator, counted in (("live", 2), ("all", 4)):
        config = load_config(None, [f"batch.denominator={denominator}", "batch.aggregation=rollout_mean"])
        step = training_step(config, groups)
        advantages = step.advantages
        [optimizer_step] = step.optimizer_steps()
        batch = step.policy_batch(optimizer_step)
        assert batch.metrics["batch/rows"] == 2
        weight = sum(float(micro.weight_L.sum()) for share in batch.micro for micro in share)
        assert weight == pytest.approx(2 / counted)
        assert live_share(groups, advantages) == 0.5


def test_only_rollouts_with_an_advantage_are_trained_on() -> None:
    config = load_config(None)
    rollouts = [rollout("a", 0, 1.0), rollout("a", 1, 0.0), rollout("b", 0, 1.0), rollout("b", 1, 1.0)]
    groups = group_rollouts(rollouts)
    advantages = training_step(config, groups).advantages
    half = 0.5**0.5
    assert mean_advantages(advantages) == pytest.approx({"a/0": half, "a/1": -half, "b/0": 0.0, "b/1": 0.0}, rel=1e-4)
    assert trained(config, groups) == [{"a/0", "a/1"}]
    assert trained(config, group_rollouts(rollouts[2:])) == []
    with_kl = load_config(None, ["algo.kl_coef=0.001"])
    assert trained(with_kl, groups) == [{"a/0", "a/1", "b/0", "b/1"}]
    rollouts[0].rows[0].mask[:] = 0
    assert trained(config, groups) == [{"a/1"}]
    rollouts[1].rows[0].mask[:] = 0
    assert trained(config, groups) == []
    metrics = rollout_metrics(rollouts, groups, 2.0)
    assert metrics["train/reward"] == 0.75
    assert metrics["train/flat_groups"] == 0.5
    assert metrics["time/tokens_per_s"] == 20.0
    assert metrics["rollout/stop/terminated"] == 1.0
    assert not [name for name in metrics if name.startswith("rollout/forks/")]
    rollouts[0].rows *= 3
    rollouts[0].rows[1:] = [replace(rollouts[0].rows[0], fork=ForkReason.THINKING)] * 2
    assert rollout_metrics(rollouts, groups, None)["rollout/forks/thinking"] == 0.5


def test_metrics_are_by_role_too_if_there_are_several() -> None:
    rollouts = [rollout("a", sample, float(sample)) for sample in range(4)]
    for number, message in enumerate(rollouts):
        message.role, message.metrics = ("first", "second")[number % 2], {"illegal": float(number == 1)}
    rollouts[3].dropped = True
    metrics = rollout_metrics(rollouts, group_rollouts(rollouts), None)
    assert (metrics["train/reward/role=first"], metrics["train/reward/role=second"]) == (1.0, 1.0)
    assert (metrics["rollout/illegal/role=first"], metrics["rollout/illegal/role=second"]) == (0.0, 0.5)
    assert metrics["rollout/turns/role=first"] == metrics["rollout/turns"]
    metrics = rollout_metrics(rollouts[::2], group_rollouts(rollouts[::2]), None)
    assert not any("role=" in key for key in metrics)


def test_seconds_in_tools_are_added_up_and_shared() -> None:
    rollouts = [rollout("a", sample, float(sample)) for sample in range(2)]
    rollouts[0].seconds, rollouts[0].tool_seconds = 3.0, 2.0
    rollouts[1].seconds, rollouts[1].tool_seconds = 5.0, 0.0
    rollouts[0].tool_uses = {"search": ToolUse(3, 1, 1.5)}
    rollouts[1].tool_uses = {"search": ToolUse(1, 0, 0.5), "run": ToolUse(1, 1, 4.0)}
    metrics = rollout_metrics(rollouts, group_rollouts(rollouts), 5.0)
    assert metrics["time/tools_s"] == 2.0
    assert metrics["time/tools_share"] == 0.25
    assert {key: value for key, value in metrics.items() if key.startswith("tool/")} == {
        "tool/run/calls": 1.0,
        "tool/run/failed_share": 1.0,
        "tool/run/seconds": 4.0,
        "tool/search/calls": 4.0,
        "tool/search/failed_share": 0.25,
        "tool/search/seconds": 0.5,
    }
    assert not any(key.startswith("time/") for key in rollout_metrics(rollouts, group_rollouts(rollouts), None))


def test_optimizer_steps_share_whole_groups() -> None:
    config = load_config(None, ["rollout.batch_size=4", "train.steps_per_rollout=2"])
    rollouts = [rollout(prompt, sample, float(sample)) for sample in range(2) for prompt in "abcd"]
    groups = group_rollouts(rollouts)
    assert trained(config, groups) == [{"a/0", "a/1", "b/0", "b/1"}, {"c/0", "c/1", "d/0", "d/1"}]


def test_metrics_of_optimizer_steps_are_added_averaged_or_the_largest() -> None:
    first = {"batch/tokens": 100.0, "train/loss": 1.0, "train/ratio_max": 3.0, "train/lr": 0.1}
    second = {"batch/tokens": 50.0, "train/loss": 2.0, "train/ratio_max": 2.0, "train/lr": 0.2}
    assert merge_metrics([first, second]) == {
        "batch/tokens": 150.0,
        "train/loss": 1.5,
        "train/ratio_max": 3.0,
        "train/lr": 0.2,
        "train/optimizer_steps": 2.0,
    }
    assert merge_metrics([first]) == first | {"train/optimizer_steps": 1.0}


def test_synthetic_rows_are_whole() -> None:
    [row] = synthetic_rows(1, 2, 5)
    assert int(np.sum(row.mask)) == 10
