"""Which tasks the sets of an evaluation have, and how each is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config.evaluation import EvalSet
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task, TaskSet
from agentrl.data.tasks import read_tasks


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """One set of an evaluation."""

    name: str
    """The set's name; empty where the configuration names none."""
    plan: EvalSet
    """How to sample, whole: nothing is taken from elsewhere any more."""
    tasks: Sequence[Task]
    """The tasks, as many as the evaluation takes."""
    source: str
    """The split or the file they are from."""

    @property
    def prefix(self) -> str:
        """What the set's metrics begin with."""
        return f"eval/{self.name}/" if self.name else "eval/"

    @property
    def label(self) -> str:
        """The set's name for people."""
        return self.name or "eval"

    @property
    def described(self) -> str:
        """The set in a line."""
        return f"{self.label}: {len(self.tasks)} tasks of {self.source} x {self.plan.n_samples}, {self.decoding}"

    @property
    def decoding(self) -> str:
        """How the set is sampled, in words."""
        plan = self.plan
        words = [f"temperature {plan.temperature:g}" if plan.temperature else "greedy"]
        words += [f"top-p {plan.top_p:g}"] if plan.top_p < 1 else []
        words += [f"top-k {plan.top_k}"] if plan.top_k > 0 else []
        return ", ".join(words)


def choose_tasks(config: Config, tasks: TaskSet) -> list[TaskChoice]:
    """Return the sets of an evaluation; none where the configuration names none and there is nothing to evaluate on.

    Raises:
        ConfigError: a set is empty or smaller than the size it gives itself, or no task has its ``by``.

    """
    if not config.eval.sets and not can_evaluate(config, tasks):
        return []
    return [_choose(config, tasks, name, plan) for name, plan in config.eval.named_sets().items()]


def can_evaluate(config: Config, tasks: TaskSet) -> bool:
    """Return whether the set that ``eval`` itself describes has tasks: data files may come without an evaluation file."""
    return config.eval.path is not None or len(tasks.split(config.eval.split or config.tasks.eval_split)) > 0


def _choose(config: Config, tasks: TaskSet, name: str, plan: EvalSet) -> TaskChoice:
    key = f"eval.sets.{name}" if name else "eval"
    given = (config.eval.sets[name] if name else config.eval).model_fields_set
    source, found = _read(config, tasks, plan, key)
    if len(found) == 0:
        raise ConfigError(
            f"{key}: {source} has no tasks to evaluate on; set {key}.split or {key}.path to what has some"
        )
    if plan.size is not None and plan.size > len(found) and "size" in given:
        raise ConfigError(f"{key}.size={plan.size}, but {source} has {len(found)} tasks; lower {key}.size")
    chosen = [found[index] for index in range(min(plan.size or len(found), len(found)))]
    if plan.group_by is not None and not any(plan.group_by in task.metadata for task in chosen):
        if "group_by" in given:
            keys = sorted({each for task in chosen for each in task.metadata})
            raise ConfigError(
                f"{key}.group_by={plan.group_by}: no task of {source} has this in its metadata, "
                f"which has: {', '.join(keys) or 'nothing'}"
            )
        plan = plan.model_copy(update={"group_by": None})
    return TaskChoice(name, plan, chosen, source)


def _read(config: Config, tasks: TaskSet, plan: EvalSet, key: str) -> tuple[str, Sequence[Task]]:
    if plan.path is not None:
        return str(plan.path), read_tasks(plan.path, config.data, f"{key}.path")
    split = plan.split or config.tasks.eval_split
    return f"the split {split!r}", tasks.split(split)


def check_goals(config: Config, sets: Sequence[TaskChoice]) -> None:
    """Refuse a ``train.stop_at`` that no evaluation could ever reach.

    Raises:
        ConfigError: nothing is evaluated, or a key does not begin with the name of a set where there are several.

    """
    names = [choice.name for choice in sets if choice.name]
    for goal in config.train.stop_at:
        if not sets:
            raise ConfigError(
                f"train.stop_at={{{goal}: …}}, but nothing is evaluated: there are no tasks to evaluate on"
            )
        if names and goal.split("/")[0] not in names:
            raise ConfigError(
                f"train.stop_at={{{goal}: …}}: with eval.sets a goal begins with a set's name, such as {names[0]}/{goal}"
            )


def reached(goals: dict[str, float], figures: dict[str, float]) -> bool:
    """Return whether an evaluation's figures reach all goals of ``train.stop_at``; no goals are never reached."""
    return bool(goals) and all(figures.get(f"eval/{key}", float("-inf")) >= aim for key, aim in goals.items())
