"""Sampling without training: rollouts as in training, to a file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from agentrl.config.evaluation import EvalSet
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.config.secret_values import hide_secrets
from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_atomically
from agentrl.core.data_source import DataSource
from agentrl.core.errors import ConfigError, RunStopped
from agentrl.core.task import task_source_name
from agentrl.core.types import Rollout
from agentrl.data.jobs import TaskJobs
from agentrl.data.task_sources import (
    MixedOrder,
    Split,
    check_not_empty,
    make_order,
    open_tasks,
    read_splits,
    split_size,
)
from agentrl.evaluation.evaluate import SetResult
from agentrl.evaluation.evaluate_policy import check_policy, open_policy
from agentrl.evaluation.metrics import compute_metrics
from agentrl.evaluation.sets import EvalTasks
from agentrl.evaluation.table import failure_lines, results_table
from agentrl.obs.progress import EpisodeProgress
from agentrl.obs.rollouts import RolloutFile, sampled_with
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.checks import check_episodes
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.run_tools import check_tools
from agentrl.runtime.services import Services


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What to sample."""

    out: Path | None
    """``….jsonl`` or ``….parquet``; there is none yet. None writes none."""
    split: Literal["train", "eval"]
    """Whether the tasks of ``tasks.train_split`` or of ``tasks.eval_split``."""
    tasks: int
    """How many of them, in the order of training; of each ``rollout.n_samples_per_prompt`` episodes."""


def check_samples_file(out: Path) -> None:
    """Check the option ``--out``, a file of samples that is written.

    Raises:
        ConfigError: it exists, its folder does not, or its name gives no format.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"--out {out}: the format follows from the name; end it in .jsonl or .parquet")
    for path in (out, out.with_suffix(".jsonl")):  # the lines that a parquet file is made of
        if path.exists():
            raise ConfigError(f"--out {out}: {path} exists; delete it or choose another name")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")


def check_plan(config: Config, plan: SamplePlan) -> None:
    """Check everything that needs no server.

    Raises:
        UserError: with the value and the key or option to change.
    """
    if plan.out is not None:
        check_samples_file(plan.out)
    check_episodes(config)
    check_tools(config)
    check_policy(config)
    splits = read_splits(config, open_tasks(config), plan.split)
    check_not_empty(config, splits)
    _check_number(plan, splits, make_order(config, splits))


def _check_number(plan: SamplePlan, splits: Mapping[str, Split], order: DataSource) -> None:
    """Check that there are as many tasks as are taken, of each source of a mixed run."""
    if plan.tasks < 1:
        raise ConfigError(f"--tasks {plan.tasks}: at least 1 is needed")
    taken = Counter({"": plan.tasks})
    if isinstance(order, MixedOrder):
        taken = Counter(order.source_at(position)[0] for position in range(plan.tasks))
    for name, tasks in splits.items():
        size = split_size(tasks)
        if size is not None and taken[name] > size:
            of = f" takes {taken[name]} of the source {name}: its split" if name else f": --split {plan.split}"
            raise ConfigError(f"--tasks {plan.tasks}{of} has {size} tasks")


async def sample(config: Config, plan: SamplePlan, console: Console) -> list[Rollout]:
    """Sample in steps of ``rollout.batch_size`` tasks, each rollout written as it ends, print a summary, and return the rollouts.

    Raises:
        RunStopped: Ctrl-C or the failure policy ended it; what it had is written.
        AgentrlError: the engine or a tool server does not start, or died; what it had is written.
    """
    tasks = open_tasks(config)
    episodes = TaskJobs(config, make_order(config, read_splits(config, tasks, plan.split)))
    size = config.rollout.batch_size
    steps = [(start, min(size, plan.tasks - start)) for start in range(0, plan.tasks, size)]
    file = None if plan.out is None else RolloutFile(plan.out)
    done: list[Rollout] = []
    total = plan.tasks * config.rollout.n_samples_per_prompt
    try:
        with (
            EpisodeProgress(console, total, "sampling") as count,
            Interrupt(count.print_text) as interrupt,
            tempfile.TemporaryDirectory() as folder,
        ):

            def write(rollout: Rollout) -> None:
                if file is not None:
                    file.write(rollout)
                done.append(rollout)
                count.add()

            async with AsyncExitStack() as exits:
                async with interrupt.guard():
                    services = await exits.enter_async_context(open_policy(config, tasks, Path(folder)))
                count.begin()
                if isinstance(services, Services) and services.agents_line:
                    count.print_text(services.agents_line)
                runner = services.runner()
                with Watchdog(config.obs.stall_warning_s, count.print_text):
                    for start, step_size in steps:
                        jobs = episodes.groups(range(start, start + step_size))
                        async with interrupt.guard_episodes(services.check):
                            await runner.run_many(jobs, write)
    except RunStopped as stop:
        written = "" if plan.out is None else f". {len(done)} of {total} rollouts are in {plan.out}"
        raise RunStopped(f"{stop}{written}") from None
    finally:
        episodes.close()
        if file is not None:
            finish_samples(config.model, file, len(done))
    by_source = {
        name: [rollout for rollout in done if task_source_name(rollout.prompt_id) == name] for name in config.sources
    }
    summaries = [_summary(config, plan, name, rollouts) for name, rollouts in (by_source or {"samples": done}).items()]
    console.print(results_table(summaries, f"{config.label}: {config.model.label}"))
    for line in failure_lines(summaries):
        console.print(line, highlight=False, soft_wrap=True)
    if plan.out is not None:
        console.print(f"written {plan.out}: {len(done)} rollouts", highlight=False, soft_wrap=True)
    return done


def finish_samples(model: ModelConfig, file: RolloutFile, count: int) -> None:
    """Convert the finished rollouts to the requested file, and name their model next to it; without any, write nothing."""
    path = file.finish()
    if not count:
        path.unlink()
        return
    section: Mapping[str, object] = {"path": model.path, "trust_remote_code": model.trust_remote_code}
    if model.endpoint is not None:
        section = {"endpoint": {"url": hide_secrets(model.endpoint.url), "model": model.endpoint.model}}
    with write_atomically(sampled_with(path)) as partial:
        partial.write_text(dump_yaml({"model": section}), encoding="utf-8")


def _summary(config: Config, plan: SamplePlan, name: str, rollouts: Sequence[Rollout]) -> SetResult:
    """Return the rollouts as one set of an evaluation, to be shown like it."""
    sampler = config.sampler
    sampling = EvalSet(
        n_samples=config.rollout.n_samples_per_prompt,
        temperature=sampler.temperature,
        top_p=sampler.top_p,
        top_k=sampler.top_k,
    )
    eval_set = EvalTasks(name, sampling, (), f"--split {plan.split}")
    return SetResult(eval_set, compute_metrics(rollouts, pass_reward=config.eval.pass_reward, group_by=None), rollouts)
