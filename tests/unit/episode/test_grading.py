"""When the runner grades rollouts with a reward function."""

import asyncio

import pytest

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import RunStopped
from agentrl.core.task import Task
from agentrl.core.types import Message, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing import ScriptedSampler
from agentrl.testing.virtual_time import run_virtual


class RecordingGrader:
    """Gives each rollout its index in the batch as reward, and records the batches."""

    def __init__(self, group, error=None):
        self.group, self.error, self.batches = group, error, []

    async def grade(self, rollouts, tools=None):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.batches.append([rollout.rollout_id for rollout in rollouts])
        for index, rollout in enumerate(rollouts):
            rollout.reward = float(index)


def run(renderer, grader, jobs, *, order, chats=None, dropped=()):
    """Run ``jobs`` (``a0`` is an episode of task ``a``) so that they end in ``order``; return what was done, in order.

    Episode ``job`` has ``chats[job]`` rollouts (1 by default), all with reward -1.
    """
    done = []

    async def generate(task, agent):
        name = agent.episode_id
        await asyncio.sleep(order.index(name))
        rollouts = [agent.chat(task.prompt).rollout(-1.0) for _ in range((chats or {}).get(name, 1))]
        for rollout in rollouts:
            rollout.dropped = name in dropped
        return rollouts

    async def play():
        runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=Env,
                        renderer=renderer,
                        sampler=ScriptedSampler([]),
                        tool_clients={},
                        limits=Limits(8, 4096, 30.0, 128),
                        sampling=SamplingParams(),
                    ),
                    generate=generate,
                    grader=grader,
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(8),
        )
        made = [Job(Task(name[0], (Message("user", "hi"),)), 0, name) for name in jobs]
        return await runner.run_many(made, lambda rollout: done.append((rollout.rollout_id, rollout.reward)))

    rollouts = run_virtual(play())
    assert [rollout.rollout_id[:2] for rollout in rollouts if "." not in rollout.rollout_id] == jobs
    assert all(rollout.graded for rollout in rollouts if not rollout.dropped)
    assert grader is None or not any(rollout.graded for rollout in rollouts if rollout.dropped)
    return done


def test_single_rollouts_are_graded_as_they_end(renderer):
    grader = RecordingGrader(group=False)
    done = run(renderer, grader, ["a0", "b0"], order=["b0", "a0"], chats={"b0": 2})
    assert grader.batches == [["b0"], ["b0.1"], ["a0"]]
    assert done == [("b0", 0.0), ("b0.1", 0.0), ("a0", 0.0)]


def test_groups_are_graded_when_their_last_episode_has_ended_in_the_order_of_the_jobs(renderer):
    grader = RecordingGrader(group=True)
    done = run(renderer, grader, ["a0", "b1", "a2"], order=["a2", "b1", "a0"], chats={"a0": 2})
    assert grader.batches == [["b1"], ["a0", "a0.1", "a2"]]
    assert done == [("b1", 0.0), ("a0", 0.0), ("a0.1", 1.0), ("a2", 2.0)]


@pytest.mark.parametrize("group", [False, True])
def test_dropped_rollouts_are_not_graded_but_done(renderer, group):
    grader = RecordingGrader(group)
    done = run(renderer, grader, ["a0", "a1", "b2"], order=["a0", "a1", "b2"], dropped=("a0", "b2"))
    assert grader.batches == [["a1"]]
    assert sorted(done) == [("a0", -1.0), ("a1", 0.0), ("b2", -1.0)]


def test_without_a_grader_rewards_stay(renderer):
    assert run(renderer, None, ["a0"], order=["a0"]) == [("a0", -1.0)]


@pytest.mark.parametrize("group", [False, True])
def test_a_grader_can_stop_the_run(renderer, group):
    with pytest.raises(RunStopped, match="no number"):
        run(renderer, RecordingGrader(group, RunStopped("no number")), ["a0"], order=["a0"])
