"""Tasks of a run by source, with checksums of them: a mixed run has several sources, any other has one, named ``""``."""

from __future__ import annotations

import inspect
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from inspect import getattr_static
from typing import Any, Literal

import orjson

from agentrl.config.load import training_configs
from agentrl.config.recorded import CONTENT
from agentrl.config.schema import Config
from agentrl.config.tasks import DataSourceConfig
from agentrl.core.checksums import sampled_checksum
from agentrl.core.data_source import DataSource
from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, UserError, unknown_name
from agentrl.core.imports import is_reference, load_object
from agentrl.core.registry import build, env_class, make_tasks
from agentrl.core.task import MadeTasks, Task, TaskSet, task_id, task_source_name, task_to_dict
from agentrl.core.user_code import calling
from agentrl.data.application_tasks import ApplicationTasks, Placeholders
from agentrl.data.buffer import Epochs, get_tasks
from agentrl.data.conversion import PromptLimit
from agentrl.data.file_tasks import FileTasks, StreamOrder, TaskStream
from agentrl.data.order import Curriculum, TaskOrder, same_ids

DATA_SOURCES: Mapping[str, type[DataSource]] = {"shuffled": TaskOrder, "curriculum": Curriculum}
"""The data sources of agentrl."""

Split = Sequence[Task] | TaskStream
"""The tasks of a source to train on."""

TaskSources = Mapping[str, TaskSet]
"""The taskset of each source, by name, in the order of ``sources``."""


@contextmanager
def errors_name_source(source: str) -> Iterator[None]:
    """Put the source's section before the message of an error of the user."""
    try:
        yield
    except UserError as error:
        if not source:
            raise
        raise type(error)("\n".join(f"sources.{source}: {line}" for line in str(error).splitlines())) from error


class EnvTasks(TaskSet):
    """The tasks of an environment class that is built with ``options``."""

    def __init__(self, env: type[EnvBase], seed: int, options: Mapping[str, object]) -> None:
        self._env = env
        self._seed = seed
        self._options = options

    def split(self, name: str) -> Sequence[Task]:
        """Return what `EnvBase.configured_tasks` returns, which is by default ``Env.tasks(name, seed)``."""
        return self._env.configured_tasks(name, self._seed, self._options)

    def call(self, name: str) -> str:
        """Return the call that `split` makes, for messages."""
        return f"{self._env.__name__}.tasks({name!r}, {self._seed})"


class NoTasks(TaskSet):
    """An empty taskset, for tasks that an application brings, and evaluations whose sets all have files."""

    def split(self, name: str) -> Sequence[Task]:
        """Return an empty sequence."""
        return ()


def open_tasks(config: Config) -> TaskSources:
    """Return the configured tasks of each source: from files, from a taskset, or the environment's own.

    Sources with the same taskset share it.

    Raises:
        ConfigError, UnknownNameError: there are none, or the source is not valid.
    """
    tasksets: dict[str, TaskSet] = {}
    configs = config.by_source()
    settings = {name: _taskset_settings(source_config) for name, source_config in configs.items()}
    for name, source_config in configs.items():
        with errors_name_source(name):
            same = next((earlier for earlier in tasksets if settings[earlier] == settings[name]), None)
            tasksets[name] = _open(source_config) if same is None else tasksets[same]
    return tasksets


def _taskset_settings(config: Config) -> tuple[object, ...]:
    """Return the settings that a taskset depends on."""
    env = (config.env.name, config.env.options) if config.tasks.name is None else None
    return config.data, config.tasks.name, config.tasks.options, env, config.rollout.agent.brings_tasks


def _open(config: Config) -> TaskSet:
    data, tasks = config.data, config.tasks
    if data.path is not None or data.eval_path is not None:
        limit = data.max_prompt_tokens
        return FileTasks(data, None if limit is None else PromptLimit(limit, config.model, config.render))
    if tasks.name is not None:
        return make_tasks(tasks.name, tasks.options)
    if config.rollout.agent.brings_tasks:
        return NoTasks()
    cls = env_class(config.env.name)
    if all(getattr_static(cls, name) is getattr_static(EnvBase, name) for name in ("tasks", "configured_tasks")):
        names = ", ".join(f"--config {name}" for name in training_configs(config.env.name))
        raise ConfigError(
            f"env.name={config.env.name} has no tasks: set data.path to a file of prompts, or tasks.name to "
            "a taskset, or define tasks(split, seed) on the environment"
            + (f"; shipped configurations with tasks: {names}" if names else "")
        )
    return EnvTasks(cls, config.run.seed, config.env.options)


def with_source_ids(source: str, tasks: Sequence[Task]) -> Sequence[Task]:
    """Return tasks with the ids that they have in the run."""
    if not source:
        return tasks
    if isinstance(tasks, MadeTasks):
        return tasks.with_source(source)
    return [replace(task, id=task_id(source, task.id)) for task in tasks]


class MixedOrder(DataSource):
    """Takes tasks of several sources, in proportion to their weights.

    Every task that is taken is of one source, which is a function of the weights and of the number of tasks before it. A
    source's tasks are those of its data source alone. Any stretch of tasks, such as a step, has each source's share of it:
    exactly if all shares are whole numbers; of two sources within one task.
    """

    def __init__(self, orders: Mapping[str, DataSource], weights: Mapping[str, float]) -> None:
        exact = {name: Fraction(str(weights[name])) for name in orders}
        # The heaviest first: each source takes its share of the positions that those before it leave.
        self._names = sorted(orders, key=lambda name: -exact[name])
        weights_left = [sum(exact[name] for name in self._names[start:]) for start in range(len(self._names))]
        self._shares = [exact[name] / weight for name, weight in zip(self._names, weights_left, strict=True)]
        self._orders = orders
        self._position = 0
        """Tasks taken since the run's start."""

    def source_at(self, position: int) -> tuple[str, int]:
        """Return the source of a position, and how many of its tasks come before."""
        for name, share in zip(self._names, self._shares, strict=True):
            index = int(position * share)
            if int((position + 1) * share) > index:
                return name, index
            position -= index
        raise AssertionError("the last source takes every position that is left")

    def get_samples(self, num_samples: int) -> list[Task]:
        """Return the next tasks.

        Raises:
            ConfigError: see `get_tasks`; or a data source returned a task of another source.
        """
        names = [self.source_at(self._position + offset)[0] for offset in range(num_samples)]
        taken: dict[str, Iterator[Task]] = {}
        for name, count in Counter(names).items():
            with errors_name_source(name):
                tasks = get_tasks(self._orders[name], count)
                for task in tasks:
                    if task_source_name(task.id) != name:
                        raise ConfigError(
                            f"tasks.data_source: the task {task.id!r} has no id that begins with '{name}/'"
                        )
            taken[name] = iter(tasks)
        self._position += num_samples
        return [next(taken[name]) for name in names]

    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Give each data source the results of its tasks."""
        for name, order in self._orders.items():
            order.on_trained({task: values for task, values in rewards.items() if task_source_name(task) == name})

    def state(self) -> dict[str, Any]:
        """Return the position, and the states of the data sources."""
        return {"position": self._position, "sources": {name: order.state() for name, order in self._orders.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the return value of `state`."""
        self._position = state["position"]
        for name, order in self._orders.items():
            order.load_state(state["sources"][name])

    def close(self) -> None:
        """Close each data source."""
        for order in self._orders.values():
            order.close()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of each data source, such as ``data/NAME/difficulty``."""
        return {
            f"data/{name}/{key.removeprefix('data/')}": value
            for name, order in self._orders.items()
            for key, value in order.metrics().items()
        }


def read_split(tasks: TaskSet, name: str, key: str) -> Sequence[Task]:
    """Return the tasks of a split.

    Args:
        tasks: the configured taskset.
        name: of the split.
        key: the configuration key that holds ``name``, for messages.

    Raises:
        UnknownNameError: the taskset knows no such split.
        ConfigError: ``split`` or ``tasks`` raises or does not return tasks, or two tasks have one id and so would be one
            group. Ids of tasks that are made on access are compared when `TaskOrder` takes them.
    """
    call = tasks.call(name) if isinstance(tasks, EnvTasks) else f"{type(tasks).__name__}.split({name!r})"
    hint = f"; it must return the tasks of the split, or () if it has none. {key} names another split"
    with calling(f"{key}={name}: {call}", hint):
        split = tasks.split(name)
    if isinstance(split, MadeTasks):
        return split
    fits = hasattr(split, "__len__") and hasattr(split, "__getitem__") and not isinstance(split, str | Mapping)
    if not fits or (wrong := [task for task in split if not isinstance(task, Task)]):
        returned = f"one with {wrong[0]!r:.100} in it" if fits else f"{split!r:.100}"
        raise ConfigError(f"{key}={name}: {call} must return a sequence of Tasks, it returned {returned}")
    numbers: dict[str, list[int]] = {}
    for number, task in enumerate(split):
        numbers.setdefault(task.id, []).append(number)
    if len(numbers) < len(split):
        raise same_ids(call, {task: equal for task, equal in numbers.items() if len(equal) > 1})
    return split


def read_splits(config: Config, tasks: TaskSources, which: Literal["train", "eval"] = "train") -> dict[str, Split]:
    """Return the tasks of each source's ``tasks.train_split`` or ``tasks.eval_split``, under their ids in the run.

    With ``data.streaming`` those of ``data.path`` are a stream. There are none to train on if the agent brings them.

    Raises:
        UserError: as in `read_split`.
    """
    splits: dict[str, Split] = {}
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            section, taskset = source_config.tasks, tasks[name]
            split = section.train_split if which == "train" else section.eval_split
            if which == "train" and source_config.rollout.agent.brings_tasks:
                splits[name] = Placeholders(name)
            elif isinstance(taskset, FileTasks) and taskset.stream is not None and split == "train":
                splits[name] = taskset.stream.with_source(name)
            else:
                splits[name] = with_source_ids(name, read_split(taskset, split, f"tasks.{which}_split"))
    return splits


def split_size(split: Split) -> int | None:
    """Return the number of tasks, of a stream that of its rows; None: not known."""
    if isinstance(split, Placeholders):
        return None
    return split.size if isinstance(split, TaskStream) else len(split)


def count_epochs(config: Config, splits: Mapping[str, Split]) -> Epochs | None:
    """Return how often a run goes through the tasks of `read_splits`; None without ``train.epochs``.

    Raises:
        ConfigError: the number of tasks is not known, or there is no full batch.
    """
    epochs, batch_size = config.train.epochs, config.rollout.batch_size
    if epochs is None:
        return None
    key = f"train.epochs={epochs:g}"
    split = splits[""]  # a rule between keys refuses it for mixed runs
    tasks = split_size(split)
    if tasks is None:
        reason = (
            "an application brings the tasks, whose number is not known"
            if isinstance(split, Placeholders)
            else f"data.path={config.data.path} is read as a stream whose length is not known"
        )
        raise ConfigError(f"{key}: {reason}; set train.steps")
    if isinstance(split, TaskStream) and split.convert.filters:
        raise ConfigError(
            f"{key}: with data.streaming=true the number of tasks is not known, as rows are left out by "
            f"{split.convert.filters}; set train.steps, or data.streaming=false"
        )
    counted = Epochs(tasks, epochs)
    if counted.limit < batch_size:
        raise ConfigError(
            f"{key} of {tasks} tasks are {counted.limit} groups, and a step takes rollout.batch_size={batch_size}: no step "
            "would be full; lower rollout.batch_size, or raise train.epochs"
        )
    return counted


def check_not_empty(config: Config, splits: Mapping[str, Split]) -> None:
    """Check that the splits to take tasks from have some.

    Raises:
        ConfigError: one is empty.
    """
    for name, source_config in config.by_source().items():
        if split_size(splits[name]) != 0:
            continue
        with errors_name_source(name):
            if source_config.data.eval_path is not None:
                raise ConfigError("there is nothing to train on: set data.path in addition to data.eval_path")
            taskset = f"tasks.name={source_config.tasks.name}"
            if source_config.tasks.name is None:
                taskset = f"env.name={source_config.env.name}"
            raise ConfigError(f"{taskset}: the split is empty; tasks.train_split and tasks.eval_split choose one")


def make_order(config: Config, splits: Mapping[str, Split]) -> DataSource:
    """Return the data source that chooses among the tasks of `read_splits`.

    Raises:
        UserError: there is no such data source, or it cannot be built.
    """
    orders = {}
    for name, source_config in config.by_source().items():
        with errors_name_source(name):
            orders[name] = make_data_source(source_config.tasks.data_source, splits[name], config.run.seed)
    if not config.sources:
        return orders[""]
    return MixedOrder(orders, {name: section.weight for name, section in config.sources.items()})


def make_data_source(section: DataSourceConfig, tasks: Split, seed: int) -> DataSource:
    """Return a data source over ``tasks``.

    Raises:
        UnknownNameError: there is none of the name.
        ConfigError: the class does not exist, is no data source, or its constructor raises or does not take an option; or it
            needs tasks by number, which a stream does not have.
    """
    name, key = section.name, "tasks.data_source.name"
    if isinstance(tasks, Placeholders):
        return ApplicationTasks(tasks, seed)
    if isinstance(tasks, TaskStream):
        if DATA_SOURCES.get(name) is TaskOrder and not section.options:
            return StreamOrder(tasks, seed)
        tasks = tasks.by_number(f"{key}={name}")
    if not is_reference(name) and name not in DATA_SOURCES:
        raise unknown_name("data source", name, DATA_SOURCES, key)
    cls = load_object(name, key) if is_reference(name) else DATA_SOURCES[name]
    if not (inspect.isclass(cls) and issubclass(cls, DataSource)):
        raise ConfigError(f"{key}={name} is {cls!r:.100}, and no subclass of agentrl.DataSource")
    with calling(f"{key}={name}: {cls.__name__}'s constructor"):
        source: DataSource = build(cls, section.options, "tasks.data_source.options", tasks, seed)
    return source


SAMPLED_TASKS = 64
"""Tasks that are read of a split whose tasks are made on access, at even distances."""


def split_contents(config: Config, splits: Mapping[str, Split]) -> dict[str, str]:
    """Return number and CRC-32 of the tasks to train on, by ``content of KEY`` with the key that chooses them.

    Of a split whose tasks are made on access (`MadeTasks`, ``data.streaming``) `SAMPLED_TASKS` are read, and of a file that is
    streamed a checksum (`sampled_checksum`).
    """
    contents = {}
    for name, source_config in config.by_source().items():
        key = "tasks.train_split" if source_config.data.path is None else "data.path"
        prefix = f"sources.{name}." if name else ""
        contents[f"{CONTENT}{prefix}{key}"] = _describe(splits[name])
    return contents


def _describe(split: Split) -> str:
    checksum, size = 0, split_size(split)
    for task in _sample(split):
        checksum = zlib.crc32(orjson.dumps(task_to_dict(task), option=orjson.OPT_SORT_KEYS), checksum)
    count = "no end" if isinstance(split, Placeholders) else "stream" if size is None else f"{size} tasks"
    in_files = ""
    if isinstance(split, TaskStream):
        files = [split.path] if split.path.is_file() else sorted(split.path.rglob("*"))
        in_files = "".join(f", {sampled_checksum(file)}" for file in files if file.is_file())
    return f"{count}{in_files}, crc32 {checksum:08x}"


def _sample(split: Split) -> Iterator[Task]:
    if isinstance(split, TaskStream):
        yield from split.sample(SAMPLED_TASKS)
    elif isinstance(split, MadeTasks):
        yield from (split[index] for index in range(0, len(split), max(1, len(split) // SAMPLED_TASKS)))
    else:
        yield from split
