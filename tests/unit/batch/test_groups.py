import numpy as np
import pytest

from agentrl.batch.groups import group_rollouts, groups_by_policy
from agentrl.core.types import Rollout, StopReason


def rollout(prompt, reward, dropped=False):
    return Rollout(prompt, f"{prompt}{reward}", [], reward, StopReason.TERMINATED, dropped=dropped)


def test_groups_are_by_task_whatever_their_order_and_size():
    """An uneven number of samples must not mix tasks, nor make one group of all."""
    shuffled = [
        rollout("b", 1),
        rollout("a", 0),
        rollout("b", 0),
        rollout("a", 0),
        rollout("c", 2),
        rollout("b", 5, True),
    ]
    groups = group_rollouts(shuffled)
    assert groups.prompt_ids_G == ("b", "a", "c")
    assert groups.groups_N.tolist() == [0, 0, 1, 1, 2]
    assert groups.rewards_N.tolist() == [1, 0, 0, 0, 2]
    assert groups.dropped == 1
    assert groups.flat_share == pytest.approx(2 / 3)
    for number, prompt in enumerate(groups.prompt_ids_G):
        assert {groups.rollouts_N[i].prompt_id for i in np.flatnonzero(groups.groups_N == number)} == {prompt}


def test_no_rollouts():
    groups = group_rollouts([rollout("a", 1, dropped=True)])
    assert groups.rollouts_N == ()
    assert groups.rows == []
    assert groups.flat_share == 0


def test_policies_have_separate_groups_of_the_same_tasks():
    rollouts = [rollout("a", 1), rollout("a", 0), rollout("b", 2), rollout("a", 4)]
    for number in (1, 3):
        rollouts[number].policy = "second"
    groups = group_rollouts(rollouts)
    actual_groups = groups_by_policy(groups)
    assert {name: (each.prompt_ids_G, each.rewards_N.tolist()) for name, each in actual_groups.items()} == {
        "main": (("a", "b"), [1, 2]),
        "second": (("a",), [0, 4]),
    }
    alone = group_rollouts([one for one in rollouts if one.policy == "main"])
    assert groups_by_policy(alone) == {"main": alone}
