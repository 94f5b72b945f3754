"""The baselines of ``rae``: read before they are updated, without bias, by role and class of opponents, in any order."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantages.rae import rae, updated_baselines
from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.batch.groups import group_rollouts
from agentrl.config.algo import AdvantageConfig, AlgoConfig, RaeAdvantage
from agentrl.core.types import Rollout, StopReason

OPTIONS = RaeAdvantage(decay=0.9)
CONFIG = AlgoConfig(advantage=AdvantageConfig(name="rae", options={"decay": 0.9}))


def step(rewards, baselines=None, **player):
    player = {"role": "first", "opponent": "mirror"} | player
    rollouts = [
        Rollout("p", str(number), [], reward, StopReason.TERMINATED, **player) for number, reward in enumerate(rewards)
    ]
    return AdvantageInput(group_rollouts(rollouts), baselines=baselines or {})


def test_the_first_step_has_no_baseline_and_the_second_has_the_mean_of_the_first():
    first = step([1.0, 0.0])
    assert rae(first, OPTIONS) == {"0": 1.0, "1": 0.0}
    found = updated_baselines(first, OPTIONS)
    assert found["first/mirror"].value == pytest.approx(0.5), "without the bias towards 0, which would give 0.095"
    assert rae(step([1.0], found), OPTIONS)["0"] == pytest.approx(0.5)


def test_roles_and_classes_of_opponents_have_separate_baselines():
    found = updated_baselines(step([1.0]), OPTIONS)
    found = updated_baselines(step([-1.0], found, role="second"), OPTIONS)
    found = updated_baselines(step([0.25], found, opponent="past"), OPTIONS)
    assert {key: round(one.value, 6) for key, one in found.items()} == {
        "first/mirror": 1.0, "second/mirror": -1.0, "first/past": 0.25,
    }  # fmt: skip


def test_without_roles_there_is_one_baseline():
    shared = RaeAdvantage(decay=0.9, by_role=False)
    found = updated_baselines(step([1.0]), shared)
    found = updated_baselines(step([1.0], found, role="second", opponent="past"), shared)
    assert {key: round(one.value, 6) for key, one in found.items()} == {"all": 1.0}
    assert rae(step([-1.0], found, role="second"), shared) == {"0": pytest.approx(-2.0)}


@given(
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5),
    st.data(),
)
def test_it_is_the_weighted_mean_of_all_rewards_in_any_order(steps, data):
    found, mixed = {}, {}
    for rewards in steps:
        found = updated_baselines(step(rewards, found), OPTIONS)
        mixed = updated_baselines(step(data.draw(st.permutations(rewards)), mixed), OPTIONS)
    assert mixed == found, "bit for bit"
    means = [float(np.mean(rewards)) for rewards in steps for _ in rewards]
    weights = OPTIONS.decay ** np.arange(len(means))[::-1]
    assert found["first/mirror"].value == pytest.approx(np.average(means, weights=weights), abs=1e-9)
    assert min(means) - 1e-9 <= found["first/mirror"].value <= max(means) + 1e-9


def test_equal_rewards_one_at_a_time_are_the_moving_mean_of_spiral():
    total = 0.0
    for _ in range(7):
        total = 0.9 * total + 0.1 * 0.5
    at_once = updated_baselines(step([0.5] * 7), OPTIONS)["first/mirror"]
    assert at_once.total == pytest.approx(total)
    assert at_once.weight == pytest.approx(1 - 0.9**7)


def test_a_checkpoint_has_the_same_baselines():
    estimators, resumed = (RunEstimators({"": CONFIG}) for _ in range(2))
    estimators.update([("", step([1.0, 0.1, 0.2]))])
    resumed.load_state(json.loads(json.dumps(estimators.state())))
    assert estimators.metrics()
    assert resumed.state() == estimators.state()
    assert resumed.metrics() == estimators.metrics()


def test_a_dropped_rollout_counts_nowhere():
    given = step([1.0, 5.0])
    kept = group_rollouts([given.groups.rollouts_N[0], replace(given.groups.rollouts_N[1], dropped=True)])
    assert updated_baselines(AdvantageInput(kept), OPTIONS)["first/mirror"].value == pytest.approx(1.0)
