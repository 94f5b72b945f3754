"""Evaluation of a policy on fixed sets of tasks, with engines that run, and the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agentrl.core.types import Rollout
from agentrl.data.jobs import Job, episode_seed
from agentrl.episode.runner import GroupRunner, SamplingChange
from agentrl.evaluation.metrics import SetMetrics, compute_metrics, flat, metrics_to_dict
from agentrl.evaluation.sets import EvalTasks


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one set."""

    eval_set: EvalTasks
    """The tasks, and how they were sampled."""
    metrics: SetMetrics
    """Its metrics."""
    rollouts: Sequence[Rollout]
    """The samples, those of a task next to each other."""


def flat_metrics(results: Sequence[SetResult]) -> dict[str, float]:
    """Return the metrics of all sets: ``eval/<metric>``, or ``eval/<set>/<metric>`` if the configuration names sets."""
    return {key: value for result in results for key, value in flat(result.metrics, result.eval_set.prefix).items()}


def report(results: Sequence[SetResult]) -> dict[str, object]:
    """Return sampling parameters and metrics by set, JSON-able; the set without a name is ``eval``."""
    return {
        result.eval_set.label: {
            "source": result.eval_set.source,
            "sampling": result.eval_set.plan.model_dump(
                mode="json", exclude={"source", "split", "path", "size", "sets"}
            ),
            **metrics_to_dict(result.metrics),
        }
        for result in results
    }


OnDone = Callable[[Rollout], None]


def make_jobs(eval_set: EvalTasks) -> list[Job]:
    """Return the episodes of a set, those of a task next to each other.

    Seeds depend on set, task and sample alone: two evaluations differ only by the policy and its sampling. Against all
    opponents, and in all seats, the policy has the same cards.
    """
    name, lineups = eval_set.name, eval_set.lineups or (None,)
    return [
        Job(
            task,
            episode_seed(0, "eval", name, task.id, sample),
            f"{eval_set.prefix}{task.id}/{sample}" + (f"/{seat}" if len(lineups) > 1 else ""),
            episode_seed(0, "eval", name, task.id) if eval_set.reset_seed == "task" else None,
            lineup,
        )
        for task in eval_set.tasks
        for sample in range(eval_set.plan.n_samples)
        for seat, lineup in enumerate(lineups)
    ]


async def evaluate(
    sets: Sequence[EvalTasks],
    runner: GroupRunner,
    on_done: OnDone | None = None,
    finished: Mapping[str, Sequence[Rollout]] = MappingProxyType({}),
) -> list[SetResult]:
    """Run all sets at the same time, under the runner's one limit on concurrency.

    Args:
        sets: from `load_eval_tasks`.
        runner: runs the episodes, with the sampling parameters of each set.
        on_done: called with every rollout once it has its reward; not with those in ``finished``.
        finished: rollouts of episodes that are not run, by the episode's id.

    Raises:
        RunStopped: the failure policy stops the run over what failed.
    """

    async def run(eval_set: EvalTasks) -> SetResult:
        plan = eval_set.plan
        change = SamplingChange(plan.temperature, plan.top_p, plan.top_k, plan.max_new_tokens)
        jobs = make_jobs(eval_set)
        remaining = [job for job in jobs if job.rollout_id not in finished]
        rollouts = await runner.with_sampling(change).run_many(remaining, on_done) if remaining else []
        return _result(eval_set, _in_order(jobs, rollouts, finished))

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(eval_set)) for eval_set in sets]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first ended the others
    return [task.result() for task in running]


def _in_order(
    jobs: Sequence[Job], rollouts: Sequence[Rollout], finished: Mapping[str, Sequence[Rollout]]
) -> Sequence[Rollout]:
    """Return the rollouts of a set in the order of its episodes: those that were run, and those that were not."""
    if len(rollouts) and not any(job.rollout_id in finished for job in jobs):
        return rollouts
    ids = {job.rollout_id for job in jobs}
    by_episode: dict[str, list[Rollout]] = {name: [*members] for name, members in finished.items()}
    for rollout in rollouts:
        by_episode.setdefault(episode_id(rollout, ids), []).append(rollout)
    return [rollout for job in jobs for rollout in by_episode.get(job.rollout_id, ())]


def finished_results(sets: Sequence[EvalTasks], rollouts: Sequence[Rollout]) -> list[SetResult]:
    """Return the results of an evaluation that was interrupted, of the sets that have finished rollouts.

    Args:
        sets: of the evaluation.
        rollouts: those that have ended.
    """
    results = []
    for eval_set in sets:
        ids = {job.rollout_id for job in make_jobs(eval_set)}
        of_set = [rollout for rollout in rollouts if episode_id(rollout, ids) in ids]
        results += [_result(eval_set, of_set)] if of_set else []
    return results


def episode_id(rollout: Rollout, ids: Container[str]) -> str:
    """Return the id of a rollout's episode, to which a loop of the user may have added a number.

    Args:
        rollout: of an evaluation.
        ids: of the episodes.
    """
    name = rollout.episode or rollout.rollout_id
    return name if name in ids else name.rpartition(".")[0]


def _result(eval_set: EvalTasks, rollouts: Sequence[Rollout]) -> SetResult:
    plan, games = eval_set.plan, bool(eval_set.lineups)
    metrics = compute_metrics(rollouts, pass_reward=plan.pass_reward, group_by=plan.group_by, games=games)
    return SetResult(eval_set, metrics, rollouts)
