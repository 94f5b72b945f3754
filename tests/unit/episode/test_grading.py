"""When rollouts get their reward from a reward function."""

import asyncio

import pytest

from agentrl.core.errors import RunStopped
from agentrl.core.types import Rollout, StopReason
from agentrl.episode.grading import Grading, Played
from agentrl.episode.tool_calls import ToolRunner


class Noting:
    """Rewards a rollout with its place in what it was given; notes who came together."""

    def __init__(self, group, error=None):
        self.group, self.error, self.given = group, error, []

    async def grade(self, rollouts, tools=None):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.given.append([rollout.rollout_id for rollout in rollouts])
        for place, rollout in enumerate(rollouts):
            rollout.reward = float(place)


def rollout(name, dropped=False):
    return Rollout(name[0], name, [], -1.0, StopReason.TERMINATED, dropped=dropped)


def run(grader, ends, tasks):
    """Let episodes end in the order of ``ends``: (number, task, rollouts); return who was done, in order."""
    done = []
    grading = Grading(grader, tasks, lambda one: done.append((one.rollout_id, one.reward)))

    async def play():
        for number, task, rollouts in ends:
            await grading.ended(number, task, Played(rollouts, ToolRunner({}, task)))

    asyncio.run(play())
    return done


def test_single_rollouts_are_graded_as_they_end():
    grader = Noting(group=False)
    done = run(grader, [(1, "b", [rollout("b0"), rollout("b0.1")]), (0, "a", [rollout("a0")])], ["a", "b"])
    assert grader.given == [["b0"], ["b0.1"], ["a0"]]
    assert done == [("b0", 0.0), ("b0.1", 0.0), ("a0", 0.0)]


def test_groups_are_graded_when_their_last_episode_has_ended_in_the_order_of_the_jobs():
    grader = Noting(group=True)
    ends = [(2, "a", [rollout("a2")]), (1, "b", [rollout("b1")]), (0, "a", [rollout("a0"), rollout("a0.1")])]
    done = run(grader, ends, ["a", "b", "a"])
    assert grader.given == [["b1"], ["a0", "a0.1", "a2"]]
    assert done == [("b1", 0.0), ("a0", 0.0), ("a0.1", 1.0), ("a2", 2.0)]


@pytest.mark.parametrize("group", [False, True])
def test_dropped_rollouts_are_not_graded_but_done(group):
    grader = Noting(group)
    ends = [(0, "a", [rollout("a0", dropped=True)]), (1, "a", [rollout("a1")]), (2, "b", [rollout("b2", dropped=True)])]
    done = run(grader, ends, ["a", "a", "b"])
    assert grader.given == [["a1"]]
    assert sorted(done) == [("a0", -1.0), ("a1", 0.0), ("b2", -1.0)]


def test_without_a_grader_rewards_stay():
    assert run(None, [(0, "a", [rollout("a0")])], ["a"]) == [("a0", -1.0)]


@pytest.mark.parametrize("group", [False, True])
def test_a_grader_can_stop_the_run(group):
    with pytest.raises(RunStopped, match="no number"):
        run(Noting(group, RunStopped("no number")), [(0, "a", [rollout("a0")])], ["a"])
