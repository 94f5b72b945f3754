"""Sets through one runner: what is asked of the engine, with which seeds, and how many at a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from deadlines import run_ready_tasks, until

from agentrl.config.evaluation import EvalSet
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import RunStopped
from agentrl.core.task import Task
from agentrl.core.types import Message, Prompt, Rollout, SamplingParams
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.evaluation.evaluate import SetResult, evaluate, flat_metrics, make_jobs
from agentrl.evaluation.sets import EvalTasks
from agentrl.testing import RecordedRequest, ScriptedSampler

END = 9


class Plain:
    """A renderer of one token a message."""

    end_token_id = END
    end_token_ids = (END,)
    pad_token_id = 0

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Prompt:
        return Prompt(tuple(range(1, len(messages) + 1)))

    def bridge(
        self, history: Sequence[Message], sampled: Sequence[int], new: Sequence[Message], tools: Any = ()
    ) -> Prompt:
        return Prompt(tuple(range(len(new))))

    def parse(self, sampled_ids: Sequence[int], tools: Any = (), *, prompt_ids: Any = ()) -> Message:
        return Message("assistant", str(len(sampled_ids)))

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class OneTurn(Env):
    """Pays 1 where a number drawn by the episode's seed is even."""

    def step(self, action: Any) -> Any:
        drawn = int(self.np_random.integers(1000))
        if self.task.id == "broken":
            raise ZeroDivisionError("by zero")
        return (), float(drawn % 2 == 0), True, False, {"metrics": {"drawn": float(drawn)}}


def choice(name: str, tasks: Sequence[str], **plan: Any) -> EvalTasks:
    made = [Task(task, (Message("user", task),), metadata={"kind": task[0]}) for task in tasks]
    return EvalTasks(name, EvalSet(**plan), made, "the split 'eval'")


def play(
    *sets: EvalTasks, concurrency: int = 4, failure: dict[str, str] | None = None, gate: asyncio.Event | None = None,
    on_done: Callable[[Rollout], None] | None = None,
) -> tuple[list[SetResult], ScriptedSampler]:  # fmt: skip
    def script(request: RecordedRequest) -> Sequence[int]:
        return [5, END]

    sampler = ScriptedSampler(script, gate=gate)
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=OneTurn,
                    renderer=Plain(),
                    sampler=sampler,
                    tool_clients={},
                    limits=Limits(max_turns=4, max_tokens=100, max_seconds=30.0, max_new_tokens=20),
                    sampling=SamplingParams(max_new_tokens=20, temperature=1.0, top_p=0.5, seed=3),
                )
            )
        },
        FailurePolicy(FailureConfig.model_validate(failure or {})),
        EpisodeSlots(concurrency),
    )

    async def main() -> list[SetResult]:
        opening = None if gate is None else asyncio.create_task(open_once_full(gate))
        results = await evaluate(sets, runner, on_done)
        if opening is not None:
            await opening
        return results

    async def open_once_full(gate: asyncio.Event) -> None:
        await until(lambda: sampler.running == concurrency)
        await run_ready_tasks()  # a request over the limit would come now
        gate.set()

    return asyncio.run(main()), sampler


def test_each_set_is_sampled_its_own_way() -> None:
    results, sampler = play(
        choice("hot", ["a", "b"], n_samples=3, temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=7),
        choice("cold", ["a"], temperature=0.0),
    )
    by_set = {request.request_id.split("/")[1]: request.params for request in sampler.requests}
    hot, cold = by_set["hot"], by_set["cold"]
    assert (hot.temperature, hot.top_p, hot.top_k, hot.max_new_tokens) == (0.7, 0.9, 20, 7)
    assert (cold.temperature, cold.top_p, cold.top_k, cold.max_new_tokens) == (0.0, 1.0, -1, 20)
    assert [[rollout.prompt_id for rollout in result.rollouts] for result in results] == [list("aaabbb"), ["a"]]
    assert [result.metrics.episodes for result in results] == [6, 1]


def test_all_sets_share_one_limit_and_run_at_the_same_time() -> None:
    sets = [choice(name, [f"{name}{number}" for number in range(3)], n_samples=2) for name in "xyz"]
    _, sampler = play(*sets, concurrency=8, gate=asyncio.Event())
    assert sampler.max_running == 8
    assert len(sampler.requests) == 18
    assert len({request.session_id for request in sampler.requests}) == 18


def test_seeds_depend_on_set_task_and_sample_alone() -> None:
    jobs = {job.rollout_id: job.seed for job in make_jobs(choice("x", ["a", "b"], n_samples=2))}
    assert len(set(jobs.values())) == 4
    more = {job.rollout_id: job.seed for job in make_jobs(choice("x", ["c", "b", "a"], n_samples=4, temperature=0.0))}
    assert jobs.items() <= more.items()
    assert set(jobs.values()).isdisjoint(job.seed for job in make_jobs(choice("y", ["a", "b"], n_samples=2)))


def test_a_task_has_one_reset_seed_unless_asked_otherwise() -> None:
    tasks = choice("x", ["a", "b"], n_samples=3)
    resets = [job.reset_seed for job in make_jobs(tasks)]
    assert resets == [resets[0]] * 3 + [resets[3]] * 3
    assert len(set(resets)) == 2
    assert {job.reset_seed for job in make_jobs(replace(tasks, reset_seed="episode"))} == {None}


def test_two_evaluations_of_one_policy_are_the_same() -> None:
    sets = [choice("x", list("abcdef"), n_samples=4, group_by="kind"), choice("y", list("abc"))]
    (first, _), (second, _) = play(*sets), play(*sets, concurrency=1)
    assert flat_metrics(first) == flat_metrics(second)
    assert 0 < flat_metrics(first)["eval/x/reward"] < 1
    assert "eval/x/drawn/kind=a" in flat_metrics(first)


def test_every_rollout_is_handed_out_as_it_ends() -> None:
    seen: list[str] = []
    play(choice("", ["a", "b"], n_samples=2), on_done=lambda rollout: seen.append(rollout.rollout_id))
    assert sorted(seen) == ["eval/a/0", "eval/a/1", "eval/b/0", "eval/b/1"]


def test_failed_episodes_are_counted_and_a_set_that_stops_ends_the_others() -> None:
    [result], _ = play(choice("", ["a", "b", "c", "broken"]), failure={"environment": "drop"})
    assert result.metrics.failed == 0.25
    assert result.metrics.episodes == 4
    with pytest.raises(RunStopped, match="by zero"):
        play(choice("x", ["broken"]), choice("y", ["a"]), failure={"environment": "stop"})
