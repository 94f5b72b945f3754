"""The baselines of ``rae``: read before they are updated, without bias, by role and class of opponents, in any order."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.advantages.rae import Rae, RoleBaseline
from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.batch.groups import group_rollouts
from agentrl.core.types import Rollout, StopReason
from tests.algo_config import make_algo

DECAY = 0.9


def make_rae(**options):
    return Rae(Rae.Options(decay=DECAY, **options))


def step(rewards, **player):
    player = {"role": "first", "opponent": "mirror"} | player
    rollouts = [
        Rollout("p", str(number), [], reward, StopReason.TERMINATED, **player) for number, reward in enumerate(rewards)
    ]
    return AdvantageInput(group_rollouts(rollouts))


def test_the_first_step_has_no_baseline_and_the_second_has_the_mean_of_the_first():
    rae, first = make_rae(), step([1.0, 0.0])
    assert rae.advantages(first) == {"0": 1.0, "1": 0.0}
    assert rae.baselines == {}, "advantages leave the state as it is"
    rae.update(first)
    assert rae.baselines["first/mirror"].mean == pytest.approx(0.5), (
        "without the bias towards 0, which would give 0.095"
    )
    assert rae.advantages(step([1.0]))["0"] == pytest.approx(0.5)


def test_roles_and_classes_of_opponents_have_separate_baselines():
    rae = make_rae()
    rae.update(step([1.0]))
    rae.update(step([-1.0], role="second"))
    rae.update(step([0.25], opponent="past"))
    means = {"first/mirror": 1.0, "second/mirror": -1.0, "first/past": 0.25}
    assert {key: round(baseline.mean, 6) for key, baseline in rae.baselines.items()} == means
    assert rae.metrics() == {f"self_play/baseline/{key}": pytest.approx(mean) for key, mean in means.items()}
    assert rae.metrics("chess").keys() == {f"self_play/baseline/chess/{key}" for key in means}


def test_without_roles_there_is_one_baseline():
    rae = make_rae(by_role=False)
    rae.update(step([1.0]))
    rae.update(step([1.0], role="second", opponent="past"))
    assert {key: round(baseline.mean, 6) for key, baseline in rae.baselines.items()} == {"all": 1.0}
    assert rae.advantages(step([-1.0], role="second")) == {"0": pytest.approx(-2.0)}


@given(
    st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5),
    st.data(),
)
def test_it_is_the_weighted_mean_of_all_rewards_in_any_order(steps, data):
    rae, mixed = make_rae(), make_rae()
    for rewards in steps:
        rae.update(step(rewards))
        mixed.update(step(data.draw(st.permutations(rewards))))
    assert mixed.baselines == rae.baselines, "bit for bit"
    means = [float(np.mean(rewards)) for rewards in steps for _ in rewards]
    weights = DECAY ** np.arange(len(means))[::-1]
    baseline = rae.baselines["first/mirror"].mean
    assert baseline == pytest.approx(np.average(means, weights=weights), abs=1e-9)
    assert min(means) - 1e-9 <= baseline <= max(means) + 1e-9


def test_equal_rewards_one_at_a_time_are_the_moving_mean_of_spiral():
    total = 0.0
    for _ in range(7):
        total = 0.9 * total + 0.1 * 0.5
    rae = make_rae()
    rae.update(step([0.5] * 7))
    assert rae.baselines["first/mirror"].total == pytest.approx(total)
    assert rae.baselines["first/mirror"].weight == pytest.approx(1 - 0.9**7)


def test_a_checkpoint_has_the_same_baselines():
    algo = make_algo(advantage={"name": "rae", "options": {"decay": DECAY}})
    saved, resumed = RunEstimators(algo.by_source), RunEstimators(algo.by_source)
    saved.update([("", step([1.0, 0.1, 0.2]))])
    state = saved.state()
    resumed.load_state(json.loads(json.dumps(state)))
    assert resumed.state() == state
    assert isinstance(resumed.state()[""]["state"]["first/mirror"], RoleBaseline)
    assert resumed.metrics() == saved.metrics()
    saved.update([("", step([0.7]))])
    assert resumed.state() == state, "a state that was returned does not change"
    other_estimators = RunEstimators(make_algo().by_source)
    other_estimators.load_state(state)
    assert other_estimators.state() == {}, "another estimator begins without a state"


def test_a_dropped_rollout_counts_nowhere():
    kept_rollout, dropped = step([1.0, 5.0]).groups.rollouts_N
    rae = make_rae()
    rae.update(AdvantageInput(group_rollouts([kept_rollout, replace(dropped, dropped=True)])))
    assert rae.baselines["first/mirror"].mean == pytest.approx(1.0)
