"""The curriculum by success rate: which tasks it prefers, resume, and what it is worth with scripted success rates."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import exp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ConfigError, DataSource, Message, Task
from agentrl.config.tasks import DataSourceConfig
from agentrl.data.order import Curriculum, TaskOrder
from agentrl.data.task_sources import make_data_source

SAMPLES = 8


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number}", (Message("user", "?"),), answer=number) for number in range(count)]


def spread(
    source: DataSource, steps: int, batch: int, rate: Callable[[Task], float], learn: Callable[[float], None] = float
) -> list[float]:
    """The mean variance of rewards within the groups of each step; each group succeeds at its task's rate."""
    rng, positions = np.random.default_rng(0), []
    for _ in range(steps):
        rewards = {task.id: rng.binomial(1, rate(task), SAMPLES).astype(float) for task in source.get_samples(batch)}
        source.on_trained({name: reward.tolist() for name, reward in rewards.items()})
        positions.append(float(np.mean([reward.var() for reward in rewards.values()])))
        learn(positions[-1])
    return positions


def test_groups_differ_more_than_in_uniform_order() -> None:
    """Of 500 tasks 40% are never solved, 40% always and 20% in half of the rollouts."""
    rate = {0: 0.0, 1: 0.0, 2: 0.5, 3: 1.0, 4: 1.0}
    gain = []
    for seed in range(3):
        actual = [
            np.mean(spread(source, 60, 16, lambda task: rate[task.answer % 5])[30:])
            for source in (Curriculum(tasks(500), seed), TaskOrder(tasks(500), seed))
        ]
        gain.append(actual[0] / actual[1])
    assert min(gain) > 2, "the second half of the steps, after about one epoch"


def test_a_simulated_policy_learns_faster() -> None:
    """The policy's skill grows with the variance within groups; a task is solved with the logistic rate of skill - difficulty."""
    difficulty = np.random.default_rng(1).normal(0, 4, 500)
    skills = {}
    for name, source in {"curriculum": Curriculum(tasks(500), 0), "uniform": TaskOrder(tasks(500), 0)}.items():
        skill = [-3.0]

        def learn(variance: float, skill: list[float] = skill) -> None:
            skill.append(skill[-1] + variance / 5)

        def rate(task: Task, skill: list[float] = skill) -> float:
            return 1 / (1 + exp(difficulty[task.answer] - skill[-1]))

        spread(source, 80, 16, rate, learn)
        skills[name] = skill[-1] + 3
    assert skills["curriculum"] > 1.25 * skills["uniform"]


def play(seed: int, rates: list[float], steps: list[int], cut: int) -> tuple[list[str], dict[str, Any]]:
    """The ids that a curriculum gives, and its last state; at step ``cut`` another curriculum loads its state."""
    source, order = Curriculum(tasks(len(rates)), seed), list[str]()
    for number, count in enumerate(steps):
        if number == cut:
            state = json.loads(json.dumps(source.state()))
            source = Curriculum(tasks(len(rates)), seed)
            source.load_state(state)
        taken = source.get_samples(count)
        order += [task.id for task in taken]
        if number % 3:
            source.on_trained(
                {task.id: [float(sample / 4 < rates[task.answer]) for sample in range(4)] for task in taken}
            )
    return order, source.state()


@given(
    seed=st.integers(0, 5),
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=20),
    steps=st.lists(st.integers(0, 8), max_size=8),
    cut=st.integers(0, 7),
)
def test_a_resumed_curriculum_goes_on_with_the_same_tasks(
    seed: int, rates: list[float], steps: list[int], cut: int
) -> None:
    assert play(seed, rates, steps, cut) == play(seed, rates, steps, -1)


@given(seed=st.integers(0, 9), size=st.integers(1, 30), parts=st.lists(st.integers(0, 5), max_size=6))
def test_the_order_is_that_of_seed_and_results(seed: int, size: int, parts: list[int]) -> None:
    source = Curriculum(tasks(size), seed)
    actual_tasks = [task.id for period in parts for task in source.get_samples(period)]
    assert actual_tasks == [task.id for task in Curriculum(tasks(size), seed).get_samples(sum(parts))]
    assert max(Counter(actual_tasks[:size]).values(), default=1) == 1, (
        "without results no task comes twice before all others"
    )


def test_a_curriculum_that_is_resumed_with_other_tasks_knows_those_that_are_where_they_were() -> None:
    before = Curriculum(tasks(8), 0)
    before.on_trained({task.id: [1.0] for task in before.get_samples(8)})
    other_tasks = [*tasks(3), replace(tasks(4)[3], id="new")]
    source = Curriculum(other_tasks, 0)
    source.load_state(before.state())
    assert source.metrics()["data/measured"] == 0.75
    source.on_trained({tasks(8)[5].id: [0.0]})
    assert source.metrics()["data/success_rate"] == 1.0, "a task that is no longer there has no rate"
    assert {task.id for task in source.get_samples(40)} == {task.id for task in other_tasks}


def test_its_metrics() -> None:
    source = Curriculum(tasks(8), 0, solved_at=0.5)
    assert source.metrics() == {"data/measured": 0.0}
    first, second, third, fourth = (task.id for task in source.get_samples(4))
    source.on_trained({first: [0.5, 1.0], second: [0.0, 0.4], third: [0.4, 0.5], fourth: [0.9, 0.0]})
    shares = {"data/unsolved": 0.25, "data/near_target": 0.5, "data/solved": 0.25}
    assert source.metrics() == {"data/measured": 0.5, "data/success_rate": 0.5, **shares}
    source.on_trained({first: [0.0, 0.0]})
    assert source.metrics()["data/solved"] == 0.0, "the newest group counts half"
    assert source.metrics()["data/near_target"] == 0.75


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("target", 1.5, "a success rate from 0 to 1"),
        ("width", 0, "above 0"),
        ("floor", 0, "each task is measured again"),
    ],
)
def test_options_that_make_no_curriculum(option: str, value: float, message: str) -> None:
    section = DataSourceConfig(name="curriculum", options={option: value})
    with pytest.raises(ConfigError, match=rf"tasks\.data_source\.options\.{option}={value}: .*{message}"):
        make_data_source(section, tasks(2), 0)
