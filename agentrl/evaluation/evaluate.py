"""Evaluation of a policy on fixed sets of tasks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from agentrl.config.saved import CONFIG
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.evaluation.metrics import compute_metrics
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import EvalTasks, load_eval_tasks
from agentrl.learner.checkpoints import latest_checkpoint
from agentrl.models.resolve import resolve_model
from agentrl.obs.episode_progress import EpisodeProgress
from agentrl.obs.rollouts import RolloutFile
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.checks import check_engine, check_episodes, open_tasks
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.jobs import watched
from agentrl.runtime.run_tools import check_tools
from agentrl.runtime.services import open_services
from agentrl.runtime.task_order import NoTasks, episode_seed
from agentrl.runtime.task_sources import TaskSources

OnDone = Callable[[Rollout], None]


def checkpoint_model(name: str) -> str:
    """Return the model folder of a run, a checkpoint or a model folder.

    Raises:
        ConfigError: the folder holds none of them.

    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / "model" / "config.json").is_file():
        return str(folder / "model")
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        raise ConfigError(f"--checkpoint {name}: neither a model, a checkpoint, nor a run with a whole checkpoint")
    return str(checkpoint / "model")


def run_of(name: str) -> Path | None:
    """Return the folder of the run that a folder is, or that a checkpoint belongs to, or None."""
    folder = Path(name).expanduser().resolve()
    for place in (folder, *folder.parents[:3]):  # RUN/checkpoints/step_000012/model
        if (place / CONFIG).is_file() and (place / "checkpoints").is_dir():
            return place
    return None


def jobs_of(eval_set: EvalTasks) -> list[Job]:
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


async def evaluate(sets: Sequence[EvalTasks], runner: EpisodeRunner, on_done: OnDone | None = None) -> list[SetResult]:
    """Run all sets at the same time, under the runner's one limit on concurrency.

    Args:
        sets: from `load_eval_tasks`.
        runner: runs the episodes, with the sampling parameters of each set.
        on_done: called with every rollout once it has its reward.

    Raises:
        RunStopped: the failure policy stops the run over what failed.

    """

    async def run(eval_set: EvalTasks) -> SetResult:
        plan = eval_set.plan
        sampling = runner.with_sampling(
            temperature=plan.temperature, top_p=plan.top_p, top_k=plan.top_k, max_new_tokens=plan.max_new_tokens
        )
        rollouts = await sampling.run_many(jobs_of(eval_set), on_done)
        games = bool(eval_set.lineups)
        found = compute_metrics(rollouts, pass_reward=plan.pass_reward, group_by=plan.group_by, games=games)
        return SetResult(eval_set, found, rollouts)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(eval_set)) for eval_set in sets]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first ended the others
    return [task.result() for task in running]


async def evaluate_policy(config: Config, console: Console, samples: Path | None = None) -> list[SetResult]:
    """Start engines and tool servers, evaluate, and return the results by set.

    Args:
        config: of the evaluation.
        console: progress is printed to it.
        samples: a ``.jsonl`` or ``.parquet`` file for the rollouts. Each is written when it ends, so that an interrupted
            evaluation leaves the finished ones, as JSON lines.

    Raises:
        ConfigError: there is nothing to evaluate on, or the configuration does not fit.
        RunStopped: Ctrl-C or the failure policy ended it.

    """
    tasks = open_eval_tasks(config)
    sets = await asyncio.to_thread(check_eval, config, tasks)
    model = resolve_model(config.model.path)
    episodes = sum(eval_set.episodes for eval_set in sets)
    file = RolloutFile(samples) if samples is not None else None
    with tempfile.TemporaryDirectory(prefix="agentrl-eval-") as folder, EpisodeProgress(console, episodes) as count:

        def done(rollout: Rollout) -> None:
            count.add()
            if file is not None:
                file.write(rollout)

        async with open_services(config, tasks, model, Path(folder), config.run.seed) as services:
            count.begin()
            with Interrupt(count.print_text) as interrupt, Watchdog(config.obs.stall_warning_s, count.print_text):
                async with watched(services, interrupt):
                    results = await evaluate(sets, services.runner(), done)
    if file is not None:
        file.finish()
    return results


def open_eval_tasks(config: Config) -> TaskSources:
    """Return the configured tasksets, or an empty one if every set has a file and the configuration names no taskset."""
    files = all(plan.path is not None for plan in config.eval.named_sets(config.sources).values())
    if files and not config.sources and config.tasks.name is None and config.data.path is None:
        return {"": NoTasks()}
    return open_tasks(config)


def check_eval(config: Config, tasks: TaskSources) -> list[EvalTasks]:
    """Check everything about an evaluation that needs no server, and return its sets.

    Raises:
        UserError: with the value and the key to change.

    """
    check_episodes(config)
    check_tools(config)
    check_engine(config)
    sets = load_eval_tasks(config, tasks)
    if not sets:
        raise ConfigError("there is nothing to evaluate on: set data.eval_path, eval.path, eval.split or eval.sets")
    return sets
