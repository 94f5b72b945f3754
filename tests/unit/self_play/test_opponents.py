"""Opponents by share of the tasks, and the policy's seat."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.config.self_play import SelfPlayConfig
from agentrl.self_play.games import POLICY
from agentrl.self_play.opponents import Seating, group_seatings, step_opponents, task_opponents

MIX = {"mirror": 0.5, "past": 0.3, "fixed:random": 0.2}


@given(st.integers(0, 10**6), st.integers(0, 500), st.integers(1, 40))
def test_every_class_has_its_share_of_every_step(seed, step, tasks):
    counter = Counter(task_opponents(MIX, tasks, seed, step))
    assert counter.total() == tasks
    for name, share in MIX.items():
        assert abs(counter[name] - share * tasks) < 1 + 1e-9


def test_shares_are_exact_in_the_mean_and_relative_to_their_sum():
    every = [name for step in range(2000) for name in task_opponents({"mirror": 1, "past": 3}, 3, 5, step)]
    assert every.count("past") / len(every) == pytest.approx(0.75, abs=0.01)


def test_a_class_without_a_share_has_no_task():
    mix = {"past": 0.0, "mirror": 1.0, "fixed:random": 0.0}
    assert {name for step in range(50) for name in task_opponents(mix, 7, 5, step)} == {"mirror"}


def seatings(mix=MIX, *, seats=2, samples=4, snapshots=("step_000000", "step_000020"), **options):
    config = SelfPlayConfig(mix=mix, **options)
    opponents = step_opponents(config, tasks=20, seed=3, step=4, snapshots=snapshots)
    return [
        group_seatings(config, opponent, task=task, seats=seats, samples=samples)
        for task, opponent in enumerate(opponents)
    ]


def test_a_task_has_one_opponent_and_the_policy_changes_seats():
    actual = seatings()
    assert actual == seatings()
    assert len(actual) == 20
    for of_task in actual:
        assert len({rollout.opponent for rollout in of_task}) == 1
        if of_task[0].opponent == "mirror":
            assert set(of_task) == {Seating("mirror", (POLICY, POLICY))}
        else:
            assert [rollout.players.index(POLICY) for rollout in of_task] in ([0, 1, 0, 1], [1, 0, 1, 0])
            assert len({name for rollout in of_task for name in rollout.players}) == 2
    names = Counter(of_task[0].players[1 - of_task[0].players.index(POLICY)] for of_task in actual)
    assert (names["step_000000"], names["step_000020"]) == (3, 3)
    assert names["fixed:random"] == 4


def test_with_one_sample_seats_change_from_task_to_task():
    actual = seatings({"fixed:random": 1.0}, seats=3, samples=1)
    assert [seating.players.index(POLICY) for (seating,) in actual[:6]] == [0, 1, 2, 0, 1, 2]


def test_without_swapping_the_policy_is_first():
    assert {
        seating.players for of_task in seatings({"past": 1.0}, swap_seats=False, snapshots=["s"]) for seating in of_task
    } == {(POLICY, "s")}


def test_without_snapshots_past_tasks_are_mirror_play():
    assert {seating for of_task in seatings({"past": 1.0}, snapshots=()) for seating in of_task} == {
        Seating("mirror", (POLICY, POLICY))
    }


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({}, "no class of opponents"),
        ({"random": 1.0}, "'random' is no class of opponents"),
        ({"fixed:": 1.0}, "names no player"),
        ({"endpoint:big": 1.0}, r"endpoint:big is no endpoint: set self_play\.endpoints\.big\.url"),
        ({"mirror": -0.5, "past": 1.0}, "shares are at least 0"),
        ({"mirror": 0.0, "past": 0.0}, "no class of opponents"),
    ],
)
def test_a_mix_that_is_none(mix, message):
    with pytest.raises(ValidationError, match=message):
        SelfPlayConfig(mix=mix)
