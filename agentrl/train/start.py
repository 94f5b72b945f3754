"""The start of a run's parts: warm start, Ray and the learner's processes, engines, tool servers. What can overlaps."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from agentrl.cluster.run_cluster import RunCluster
from agentrl.config.runners import describe_runners
from agentrl.data.task_sources import TaskSources, open_tasks
from agentrl.evaluation.sets import load_eval_tasks
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.obs.console import print_message
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.self_play.game_scores import open_game_scores
from agentrl.train.evaluations import Evaluator
from agentrl.train.replay import open_replay
from agentrl.train.rollout_source import RolloutSource, RunInputs
from agentrl.train.sampling import Sampling, open_sampling, start_services
from agentrl.train.teachers import Teachers, open_teachers
from agentrl.train.warm_start import WarmStart


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run trains with."""

    source: RolloutSource
    evaluator: Evaluator | None
    """None with recorded rollouts."""
    learner: LearnerGroup
    critic: CriticGroup | None
    teachers: Teachers | None


async def open_parts(
    run: RunInputs,
    checkpoint: Path | None,
    replay: Path | None,
    interrupt: Interrupt,
    exits: AsyncExitStack,
    console: Console,
) -> RunParts:
    """Start the parts of a run: concurrently, or one after the other if they share GPUs."""
    cluster = RunCluster(run.config, run.folder, run.model, run.shape, checkpoint, with_engines=replay is None)
    exits.push_async_callback(cluster.aclose)
    if replay is not None:
        await cluster.open()
        cluster.load()
        teachers = await open_teachers(run.config, run.model, run.folder / "logs", exits)
        source = open_replay(run.config, replay, run.model, interrupt)
        return RunParts(source, None, *(await cluster.learner()), teachers)
    tasks = open_tasks(run.config)
    warm = run.warm_start
    if warm is not None and (why_alone := await asyncio.to_thread(warm.why_alone, run.config)):
        print_message(console, f"the engines start after the warm start: {why_alone}")
        await warm.train(console)
        run, warm = replace(run, warm_start=None), None
    if warm is None:
        started = await _start_processes(run, cluster, tasks, exits)
    else:
        starting = asyncio.create_task(_start_processes(run, cluster, tasks, exits))
        await _train_meanwhile(warm, starting, interrupt, console)
        cluster.load()
        started = await starting
    started.services.check_learner = cluster.check
    sampling = await open_sampling(run, started.services, started.dtype, tasks, interrupt, exits, cluster)
    evaluator = _open_evaluator(sampling, tasks)
    learner, critic = await cluster.learner()
    sampling.add_critic(critic)
    await sampling.begin()
    if run.config.rollout.runners == "auto" and (cores := cluster.runner_cores):
        print_message(console, f"episodes run {describe_runners(run.config, cores)}")
    if line := started.services.agents_line:
        print_message(console, line)
    return RunParts(sampling, evaluator, learner, critic, started.teachers)


@dataclass(frozen=True, slots=True)
class _Started:
    """What does not need the initial weights."""

    services: Services
    dtype: str | None
    """See `start_services`."""
    teachers: Teachers | None


async def _start_processes(run: RunInputs, cluster: RunCluster, tasks: TaskSources, exits: AsyncExitStack) -> _Started:
    """Start Ray and the learner's processes, then teachers, engines and tool servers; load the weights unless a warm start
    writes them.
    """
    await cluster.open()
    if run.warm_start is None:
        cluster.load()
    teachers = await open_teachers(run.config, run.shape, run.folder / "logs", exits)
    return _Started(*(await start_services(run, cluster, tasks, exits)), teachers)


async def _train_meanwhile(
    warm: WarmStart, starting: asyncio.Task[_Started], interrupt: Interrupt, console: Console
) -> None:
    """Make the warm start while the run's processes start. An error of either ends both."""

    def check() -> None:
        if starting.done():
            starting.result().services.check()

    try:
        async with interrupt.guard(check):
            await warm.train(console)
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        raise


def _open_evaluator(sampling: Sampling, tasks: TaskSources) -> Evaluator:
    config, services = sampling.config, sampling.services
    return Evaluator(
        config.eval,
        services,
        load_eval_tasks(config, tasks),
        sampling.records.recorder,
        sampling.interrupt,
        sampling.weights,
        sampling.self_play,
        open_game_scores(config, services.renderer, services.fleet.vocabulary.size),
    )
