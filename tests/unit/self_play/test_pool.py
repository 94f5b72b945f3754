"""The opponent pool: what it keeps and whom it chooses, as a function of seed and step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.self_play import PoolConfig
from agentrl.self_play.league import OpponentPool, snapshot_name


def pool(count=5, **options):
    return OpponentPool(PoolConfig(**options), [20 * number for number in range(count)])


def even(name):
    return 0.5


@given(st.integers(1, 8), st.integers(1, 60), st.integers(0, 1000))
def test_it_keeps_the_first_the_newest_and_the_best(keep, snapshots, choice):
    opponent_pool = OpponentPool(PoolConfig(keep=keep))
    kept_names, best = set(), None
    for step in range(snapshots):
        kept_names.add(step)
        gone = opponent_pool.add(step, best)
        assert set(gone) <= kept_names
        kept_names -= set(gone)
        assert kept_names == set(opponent_pool.steps)
        assert opponent_pool.steps == sorted(opponent_pool.steps)
        assert step in kept_names
        if best is not None and keep >= 3:
            assert {0, best} <= kept_names
        best = opponent_pool.steps[choice % len(opponent_pool.steps)]
    assert len(kept_names) == min(keep, snapshots)


def test_snapshots_stay_spread_over_the_run():
    opponent_pool = OpponentPool(PoolConfig(keep=5))
    for step in range(0, 400, 10):
        opponent_pool.add(step)
    gaps = np.diff(opponent_pool.steps)
    assert (opponent_pool.steps[0], opponent_pool.steps[-1]) == (0, 390)
    assert gaps.max() <= 0.6 * 390


def test_due_once_every_so_many_steps():
    opponent_pool = OpponentPool(PoolConfig(snapshot_every=20), [0])
    assert [step for step in range(61) if opponent_pool.due(step)] == [20, 40, 60]


def test_weights():
    assert pool(3, choose="latest").weights([0.5] * 3).tolist() == [0, 0, 1]
    assert pool(4).weights([0.5] * 4) == pytest.approx([0.25] * 4)
    assert pool(3, choose="recent", recency=0.5).weights([0.5] * 3) == pytest.approx([1 / 7, 2 / 7, 4 / 7])
    hard = pool(3, choose="pfsp", pfsp_power=2).weights([1.0, 0.5, 0.0])
    assert hard == pytest.approx([0, 0.2, 0.8])
    assert pool(2, choose="pfsp").weights([1.0, 1.0]) == pytest.approx([0.5, 0.5]), "beaten ones stay in the game"


@pytest.mark.parametrize("choose", ["latest", "uniform", "recent", "pfsp"])
def test_the_choice_is_a_function_of_seed_and_step(choose):
    actual_pool = pool(5, choose=choose)
    chosen = [actual_pool.choose(7, step, 2, even) for step in range(50)]
    assert chosen == [pool(5, choose=choose).choose(7, step, 2, even) for step in range(50)]
    assert all(len(set(names)) == len(names) for names in chosen)
    if choose == "latest":
        assert chosen == [["step_000080"]] * 50
    else:
        assert chosen != [actual_pool.choose(8, step, 2, even) for step in range(50)]
        assert {name for names in chosen for name in names} == {snapshot_name(step) for step in actual_pool.steps}


def test_probabilities_are_those_of_the_weights():
    actual_pool = pool(3, choose="recent", recency=0.5)
    chosen = [actual_pool.choose(1, step, 1, even)[0] for step in range(1000)]
    shares = [chosen.count(snapshot_name(step)) / 1000 for step in actual_pool.steps]
    assert shares == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.04)


def test_an_empty_pool_has_nobody():
    assert OpponentPool(PoolConfig()).choose(0, 1, 2, even) == []
