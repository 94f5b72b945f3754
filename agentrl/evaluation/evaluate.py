"""Evaluation: run the policy on fixed sets of tasks and take the means."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, ConfigError
from agentrl.core.task import TaskSet
from agentrl.core.types import Rollout
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.evaluation.metrics import figures_of
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import TaskChoice, choose_tasks
from agentrl.learner.checkpoints import latest_checkpoint
from agentrl.models.resolve import resolve_model
from agentrl.obs.episode_progress import EpisodeProgress
from agentrl.obs.rollouts import RolloutFile
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.checks import check_engine, check_episodes, open_tasks
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services, open_services
from agentrl.runtime.task_order import NoTasks, episode_seed

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


def run_config_file(name: str) -> Path | None:
    """Return the ``config.yaml`` of the run that a folder is, or that a checkpoint lies in; None where there is none."""
    folder = Path(name).expanduser().resolve()
    for place in (folder, *folder.parents[:3]):  # RUN/checkpoints/step_000012/model
        if (place / "config.yaml").is_file() and (place / "checkpoints").is_dir():
            return place / "config.yaml"
    return None


def jobs_of(choice: TaskChoice) -> list[Job]:
    """Return the episodes of a set, those of a task side by side.

    Their seeds depend on set, task and sample alone, so two evaluations differ only by the policy and its sampling.
    """
    return [
        Job(task, episode_seed(0, "eval", choice.name, task.id, sample), f"{choice.prefix}{task.id}/{sample}")
        for task in choice.tasks
        for sample in range(choice.plan.n_samples)
    ]


async def evaluate(sets: Sequence[TaskChoice], runner: EpisodeRunner, on_done: OnDone | None = None) -> list[SetResult]:
    """Run all sets at the same time, under the runner's one limit on concurrency.

    Args:
        sets: as `choose_tasks` returns them.
        runner: plays the episodes; how it samples each set says.
        on_done: gets every rollout once it has its reward.

    Raises:
        RunStopped: the failure policy stops the run over what failed.

    """

    async def run(choice: TaskChoice) -> SetResult:
        plan = choice.plan
        sampling = runner.with_sampling(
            temperature=plan.temperature, top_p=plan.top_p, top_k=plan.top_k, max_new_tokens=plan.max_new_tokens
        )
        rollouts = await sampling.run_many(jobs_of(choice), on_done)
        return SetResult(choice, figures_of(rollouts, pass_reward=plan.pass_reward, by=plan.group_by), rollouts)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(choice)) for choice in sets]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first ended the others
    return [task.result() for task in running]


async def evaluate_policy(config: Config, console: Console, samples: Path | None = None) -> list[SetResult]:
    """Start what an evaluation needs, run it, and return its results by set.

    Args:
        config: what to evaluate, and on what.
        console: where progress is shown.
        samples: a ``.jsonl`` or ``.parquet`` file for the rollouts. They are written as they end, so that an evaluation
            that does not come to its end leaves those it had, as JSON lines.

    Raises:
        ConfigError: there is nothing to evaluate on, or the configuration does not fit.
        RunStopped: Ctrl-C or the failure policy ended it.

    """
    tasks = open_eval_tasks(config)
    sets = check_eval(config, tasks)
    model = resolve_model(config.model.path)
    episodes = sum(len(choice.tasks) * choice.plan.n_samples for choice in sets)
    file = RolloutFile(samples) if samples is not None else None
    with tempfile.TemporaryDirectory(prefix="agentrl-eval-") as folder, EpisodeProgress(console, episodes) as count:

        def done(rollout: Rollout) -> None:
            count.add()
            if file is not None:
                file.write(rollout)

        async with open_services(config, tasks, model, Path(folder), config.run.seed) as services:
            count.begin()
            with Interrupt() as interrupt, Watchdog(config.obs.stall_warning_s, count.print_text):
                results = await evaluate_watched(sets, services, interrupt, done)
    if file is not None:
        file.finish()
    return results


async def evaluate_watched(
    sets: Sequence[TaskChoice], services: Services, interrupt: Interrupt, on_done: OnDone | None = None
) -> list[SetResult]:
    """Evaluate on a running services. Ctrl-C ends it, and a server that dies ends it with the server's own error."""
    try:
        return await interrupt.guard(evaluate(sets, services.runner(), on_done), services.check)
    except AgentrlError:
        services.check()
        raise


def open_eval_tasks(config: Config) -> TaskSet:
    """Return the taskset, or one without tasks where every set brings its own file and the configuration names none."""
    files = all(plan.path is not None for plan in config.eval.named_sets().values())
    if files and config.tasks.name is None and config.data.path is None:
        return NoTasks()
    return open_tasks(config)


def check_eval(config: Config, tasks: TaskSet) -> list[TaskChoice]:
    """Check everything about an evaluation that needs no server, and return its sets.

    Raises:
        UserError: with the value and the key to change.

    """
    check_episodes(config)
    check_engine(config)
    sets = choose_tasks(config, tasks)
    if not sets:
        raise ConfigError("there is nothing to evaluate on: set data.eval_path, eval.path, eval.split or eval.sets")
    return sets
