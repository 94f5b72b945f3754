"""Evaluation: run the policy on a fixed set of tasks and take the means."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from agentrl.config.schema import Config
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.errors import ConfigError
from agentrl.evaluation import eval_figures
from agentrl.learner.checkpoints import latest_checkpoint
from agentrl.models.resolve import resolve_model
from agentrl.preflight import check_run, open_tasks
from agentrl.stack import open_stack
from agentrl.task import TaskSet
from agentrl.tasksource import episode_seed


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


async def evaluate(config: Config, tasks: TaskSet, runner: EpisodeRunner) -> dict[str, float]:
    """Run the first ``eval.size`` tasks of the evaluation split once each and return ``eval/…`` figures.

    Episodes' seeds depend on the task alone, so two evaluations differ only by the policy and its sampling.
    """
    split = tasks.split(config.tasks.eval_split)
    chosen = [split[index] for index in range(config.eval.size or len(split))]
    jobs = [Job(task, episode_seed(0, "eval", task.id), f"eval/{task.id}") for task in chosen]
    return eval_figures(await runner.run_many(jobs), config.eval.by)


async def evaluate_policy(config: Config, console: Console) -> dict[str, float]:
    """Start what an evaluation needs, run it, and return its figures."""
    check_run(config)
    tasks = open_tasks(config)
    model = resolve_model(config.model.path)
    with (
        tempfile.TemporaryDirectory(prefix="agentrl-eval-") as folder,
        console.status("starting engine and tools") as status,
    ):
        async with open_stack(config, tasks, model, Path(folder), config.run.seed) as stack:
            status.update(f"evaluating at temperature {config.eval.temperature:g}")
            return await evaluate(config, tasks, stack.runner(temperature=config.eval.temperature))
