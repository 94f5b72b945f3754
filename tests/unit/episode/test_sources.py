"""Episodes of several sources at once: each has environment, limits and grader of its source."""

import asyncio
from dataclasses import replace

import pytest

from agentrl import Env, Message, Task
from agentrl.core.types import StopReason
from agentrl.data.jobs import Job
from agentrl.episode.runner import EpisodeRunner, SamplingChange
from tests.unit.episode.test_runner import build


class Same(Env):
    """Every answer is worth its number, and a second turn follows."""

    value = 1.0

    def step(self, action):
        return (Message("user", "again"),), self.value, False, False, {}


class Other(Same):
    value = 10.0


class Doubled:
    """Doubles the reward of rollouts, a task's at a time."""

    group = True

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def grade(self, rollouts, call_tools):
        self.calls.append([rollout.rollout_id for rollout in rollouts])
        for rollout in rollouts:
            rollout.reward *= 2


def jobs(count: int) -> list[Job]:
    """Two samples of tasks of both sources in turn; both sources have tasks of the same names."""
    return [
        Job(Task(f"{source}/t{number}", (Message("user", "?"),)), sample, f"{source}-{number}-{sample}")
        for number in range(count)
        for source in ("a", "b")
        for sample in range(2)
    ]


def joined(first: EpisodeRunner, second: EpisodeRunner, grader: Doubled | None = None) -> EpisodeRunner:
    """A runner of two sources, with the slots of the first."""
    settings = {"a": first._by_source[""], "b": replace(second._by_source[""], grader=grader)}
    return EpisodeRunner(settings, first._failure, first._slots)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_job_runs_as_its_source_says(renderer, turns):
    first, sampler = build(renderer, ["x"] * 2, Same, max_turns=1, concurrency=3)
    second, _ = build(renderer, ["x"] * 2, Other, max_turns=turns)
    grader = Doubled()
    done: list[str] = []
    runner = joined(first, second, grader)
    source_jobs = jobs(3)
    rollouts = asyncio.run(runner.run_many(source_jobs, lambda rollout: done.append(rollout.rollout_id)))
    assert [rollout.rollout_id for rollout in rollouts] == [job.rollout_id for job in source_jobs]
    assert sorted(done) == sorted(job.rollout_id for job in source_jobs)
    for rollout in rollouts:
        assert rollout.stop_reason is StopReason.MAX_TURNS
        assert rollout.prompt_id[0] == rollout.rollout_id[0]
        assert rollout.reward == (1.0 if rollout.prompt_id[0] == "a" else 2 * 10.0 * turns)
    assert sorted(grader.calls) == [[f"b-{number}-0", f"b-{number}-1"] for number in range(3)]
    assert len(sampler.requests) == 6


def test_sampling_parameters_change_for_all_sources(renderer):
    (first, first_runner), (second, two) = (build(renderer, ["x"] * 2, env, max_turns=1) for env in (Same, Other))
    runner = joined(first, second)
    changed = runner.with_sampling(SamplingChange(temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=7))
    asyncio.run(changed.run_many(jobs(1)))
    assert {
        (request.params.temperature, request.params.max_new_tokens) for request in first_runner.requests + two.requests
    } == {(0.5, 7)}
    asyncio.run(runner.run_many(jobs(1)))
    assert first_runner.requests[-1].params.temperature == two.requests[-1].params.temperature == 1.0
