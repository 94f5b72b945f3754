"""The sets of an evaluation: their tasks and sampling parameters."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from agentrl.config.evaluation import EvalSet
from agentrl.config.rollout import ResetSeed
from agentrl.config.schema import Config
from agentrl.config.tasks import TasksConfig
from agentrl.config.train import TrainConfig
from agentrl.containers.task_needs import check_task_folders
from agentrl.core.errors import ConfigError
from agentrl.core.lineup import Lineup
from agentrl.core.task import MadeTasks, Task, TaskSet
from agentrl.data.file_tasks import read_tasks
from agentrl.data.task_sources import TaskSources, errors_name_source, read_split, with_source_ids
from agentrl.self_play.opponents import eval_lineups


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """One set of an evaluation, with its tasks."""

    name: str
    """The set's name; empty if the configuration names none."""
    plan: EvalSet
    """Its configuration, with the defaults of the section ``eval`` filled in."""
    tasks: Sequence[Task]
    """Its tasks, at most ``plan.size``."""
    source: str
    """The split or the file of the tasks."""
    reset_seed: ResetSeed = "task"
    """``rollout.reset_seed``."""
    opponent: str = ""
    """Name of the opponents in metrics, if ``self_play.eval.opponents`` has some."""
    lineups: Sequence[Lineup] = ()
    """Who plays, one episode for each; empty: as in training."""

    @property
    def full_name(self) -> str:
        """Name of the set and of its opponents, in metric names; empty without both."""
        return "/".join(name for name in (self.name, self.opponent) if name)

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.tasks) * self.plan.n_samples * max(len(self.lineups), 1)

    @property
    def prefix(self) -> str:
        """Prefix of the set's metric names."""
        return f"eval/{self.full_name}/" if self.full_name else "eval/"

    @property
    def label(self) -> str:
        """The set's name in output: ``eval`` if it has none."""
        return self.full_name or "eval"

    @property
    def description(self) -> str:
        """One line about the set."""
        return f"{self.label}: {len(self.tasks)} tasks of {self.source} x {self.samples}, {self.decoding}"

    @property
    def samples(self) -> str:
        """Samples of a task in words, such as ``4 x 2 seats``."""
        seats = f" x {len(self.lineups)} seats" if len(self.lineups) > 1 else ""
        return f"{self.plan.n_samples}{seats}"

    @property
    def decoding(self) -> str:
        """Sampling parameters in words, such as ``temperature 1, top-p 0.9``."""
        plan = self.plan
        words = [f"temperature {plan.temperature:g}" if plan.temperature else "greedy"]
        words += [f"top-p {plan.top_p:g}"] if plan.top_p < 1 else []
        words += [f"top-k {plan.top_k}"] if plan.top_k > 0 else []
        return ", ".join(words)


class _FirstTasks(MadeTasks):
    """The first tasks of a split that makes its tasks on access."""

    def __init__(self, tasks: MadeTasks, size: int) -> None:
        super().__init__(tasks.split, size)
        self._tasks = tasks

    @override
    def make(self, index: int) -> Task:
        return self._tasks[index]


def load_eval_tasks(config: Config, tasks: TaskSources, *, on_access: bool = False) -> list[EvalTasks]:
    """Return the sets of an evaluation; without ``eval.sets``, only sets that have tasks.

    Args:
        config: of the run.
        tasks: of its sources.
        on_access: leave tasks that a split makes on access so, for who needs a few; their folders are not checked.

    Raises:
        ConfigError: a set is empty or smaller than the size it gives itself, or no task has the metadata key ``group_by``.
    """
    sources, named_by_user = config.by_source(), config.eval.sets
    eval_sets = []
    for name, plan in config.eval.named_sets(config.sources).items():
        source = plan.source or ""
        with errors_name_source("" if name in named_by_user else source):
            source_config, source_tasks = sources[source], tasks[source]
            if name in named_by_user or can_evaluate(source_config.eval, source_config.tasks, source_tasks):
                eval_sets.append(_load(source_config, source_tasks, name, plan, on_access=on_access))
    if by_opponent := eval_lineups(config):
        return [
            replace(eval_set, opponent=opponent, lineups=lineups)
            for eval_set in eval_sets
            for opponent, lineups in by_opponent.items()
        ]
    return eval_sets


def can_evaluate(plan: EvalSet, config: TasksConfig, tasks: TaskSet) -> bool:
    """Return whether the set of the section ``eval`` has tasks: data files may have no evaluation file."""
    return plan.path is not None or len(_split(config, tasks, plan, "eval")[1]) > 0


def _load(config: Config, tasks: TaskSet, name: str, plan: EvalSet, *, on_access: bool) -> EvalTasks:
    """Return a set; ``config`` and ``tasks`` are those of its source."""
    key = f"eval.sets.{name}" if name in config.eval.sets else "eval"
    # The sets that a mixed run has without eval.sets do not size themselves.
    set_keys = config.eval.sets[name].model_fields_set if name in config.eval.sets else set()
    set_keys = config.eval.model_fields_set if not name else set_keys
    if plan.path is not None:
        source, tasks_of_split = str(plan.path), read_tasks(plan.path, config.data, f"{key}.path")
    else:
        source, tasks_of_split = _split(config.tasks, tasks, plan, key)
    if len(tasks_of_split) == 0:
        raise ConfigError(
            f"{key}: {source} has no tasks to evaluate on; set {key}.split or {key}.path to what has some"
        )
    if plan.size is not None and plan.size > len(tasks_of_split) and "size" in set_keys:
        raise ConfigError(f"{key}.size={plan.size}, but {source} has {len(tasks_of_split)} tasks; lower {key}.size")
    size = min(plan.size or len(tasks_of_split), len(tasks_of_split))
    chosen: Sequence[Task]
    if on_access and isinstance(tasks_of_split, MadeTasks):
        chosen = _FirstTasks(tasks_of_split, size)
    else:
        chosen = [tasks_of_split[index] for index in range(size)]
        check_task_folders(chosen, config.containers)
    if plan.group_by is not None and not any(plan.group_by in task.metadata for task in chosen):
        if "group_by" in set_keys:
            keys = sorted({key_name for task in chosen for key_name in task.metadata})
            raise ConfigError(
                f"{key}.group_by={plan.group_by}: no task of {source} has this in its metadata, "
                f"which has: {', '.join(keys) or 'nothing'}"
            )
        plan = plan.model_copy(update={"group_by": None})
    return EvalTasks(name, plan, with_source_ids(plan.source or "", chosen), source, config.rollout.reset_seed)


def _split(config: TasksConfig, tasks: TaskSet, plan: EvalSet, key: str) -> tuple[str, Sequence[Task]]:
    split, of = (plan.split, f"{key}.split") if plan.split else (config.eval_split, "tasks.eval_split")
    return f"the split {split!r}", read_split(tasks, split, of)


def check_goals(config: TrainConfig, sets: Sequence[EvalTasks], function: str | None = None) -> None:
    """Check that an evaluation can reach ``train.stop_at``; what a function of the user measures is not known before.

    Raises:
        ConfigError: nothing is evaluated, or a key does not start with the name of a set although there are several.
    """
    names = [eval_set.full_name for eval_set in sets if eval_set.full_name]
    for goal in config.stop_at if function is None else ():
        if not sets:
            raise ConfigError(
                f"train.stop_at={{{goal}: …}}, but nothing is evaluated: there are no tasks to evaluate on"
            )
        if names and not any(goal.startswith(f"{name}/") for name in names):
            raise ConfigError(
                f"train.stop_at={{{goal}: …}}: with several sets a goal starts with a set's name, such as {names[0]}/{goal}"
            )


def check_goals_are_measured(key: str, goals: Iterable[str], metrics: Mapping[str, float]) -> None:
    """Check that an evaluation has the metrics that the configuration names at ``key``: a run would never reach another.

    Raises:
        ConfigError: it lacks one; the message has the nearest metric.
    """
    measured = [name.removeprefix("eval/") for name in metrics if name.startswith("eval/")]
    for goal in goals:
        if goal not in measured:
            near = difflib.get_close_matches(goal, measured, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(measured)[:8])}"
            raise ConfigError(f"{key} names {goal!r}, but the evaluation has no such metric{hint}")


def reaches_goals(goals: Mapping[str, float], metrics: Mapping[str, float]) -> bool:
    """Return whether an evaluation's metrics reach all goals of ``train.stop_at``; False if there are none."""
    return bool(goals) and all(metrics.get(f"eval/{key}", float("-inf")) >= aim for key, aim in goals.items())
