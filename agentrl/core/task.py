"""Tasks and tasksets."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, overload

import numpy as np

from agentrl.core.errors import ConfigError, TaskError
from agentrl.core.types import Message, message_from_dict, message_to_dict

IMAGE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]{0,511}$"
"""Pattern of a container image's name, with tag or digest."""


def task_id(source: str, name: str) -> str:
    """Return the id of a task in a mixed run, which begins with its source; without a source it is the task's own."""
    return f"{source}/{name}" if source else name


def task_source_name(task: str) -> str:
    """Return the source in the id of a task of a mixed run; see `task_id`."""
    return task.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. Example: ``Task("multihop/train/17", (Message("user", "Where was X born?"),), answer="Y")``."""

    id: str
    """Unique in its taskset; becomes the ``prompt_id`` of its group. In a mixed run it begins with the source's name."""
    prompt: tuple[Message, ...]
    """The question. An environment may wrap it into its protocol's prompt."""
    answer: Any = None
    """What the reward compares with: a string, a list of accepted strings, or anything the environment knows."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able facts about the task, such as ``{"hops": 2, "corpus": "train"}``. ``sandbox_image`` is for agentrl: see
    `Task.sandbox_image`."""

    def __post_init__(self) -> None:
        """Check that the id is a text, and the prompt messages of texts; a list becomes a tuple."""
        if not isinstance(self.id, str):
            raise ValueError(f"Task takes a str as its id, not {self.id!r:.100}")
        if isinstance(self.prompt, list):
            object.__setattr__(self, "prompt", tuple(self.prompt))
        if not isinstance(self.prompt, tuple) or not all(
            isinstance(message, Message) and isinstance(message.content, str) for message in self.prompt
        ):
            raise ValueError(f"Task {self.id!r:.100} takes a tuple of Messages with texts, not {self.prompt!r:.100}")

    @property
    def question(self) -> str:
        """The text of the last prompt message."""
        return self.prompt[-1].content if self.prompt else ""

    @property
    def sandbox_image(self) -> str | None:
        """Container image of the episode's sandboxes, ``metadata["sandbox_image"]``; None: that of ``sandbox.image``.

        Raises:
            TaskError: it is not the name of an image.
        """
        image = self.metadata.get("sandbox_image")
        if image is not None and not (isinstance(image, str) and re.fullmatch(IMAGE_NAME, image)):
            raise TaskError(f"task {self.id!r}: metadata['sandbox_image']={image!r:.100} is not the name of an image")
        return image


def task_to_dict(task: Task) -> dict[str, Any]:
    """Return a task as JSON-able data.

    Raises:
        ConfigError: its answer or metadata hold what JSON cannot, and what is no tuple.
    """
    return {
        "id": task.id,
        "prompt": [message_to_dict(message) for message in task.prompt],
        "answer": _to_json(task.answer, task.id, "answer"),
        "metadata": _to_json(task.metadata, task.id, "metadata"),
    }


def task_from_dict(data: Mapping[str, Any]) -> Task:
    """Return the task from the return value of `task_to_dict`."""
    prompt = tuple(message_from_dict(message) for message in data["prompt"])
    return Task(data["id"], prompt, _from_json(data["answer"]), _from_json(data["metadata"]))


def _to_json(value: Any, task: str, field_name: str) -> Any:
    """Return a value as JSON that keeps tuples and keys of dictionaries that are no strings; see `_from_json`.

    Raises:
        ConfigError: it holds something else than what a task may hold.
    """
    if isinstance(value, list):
        return [_to_json(member, task, field_name) for member in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(member, task, field_name) for member in value]}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_to_json(key, task, field_name), _to_json(member, task, field_name)] for key, member in value.items()
            ]
        }
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"task {task}: its {field_name} holds {value!r:.100} of type {type(value).__name__}, which a checkpoint cannot hold; "
        "use None, bool, int, float, str, list, tuple and dict"
    )


def _from_json(data: Any) -> Any:
    """Return the value from the return value of `_to_json`."""
    if isinstance(data, list):
        return [_from_json(member) for member in data]
    if not isinstance(data, dict):
        return data
    [(kind, members)] = data.items()
    if kind == "tuple":
        return tuple(map(_from_json, members))
    return {_from_json(key): _from_json(member) for key, member in members}


class MadeTasks(Sequence[Task]):
    """The tasks of a split, each made on access: a subclass implements `make`.

    Args:
        split: the split's name, for messages.
        size: number of tasks.
    """

    _source = ""
    """In a mixed run the name with which ids begin."""

    def __init__(self, split: str, size: int) -> None:
        self.split = split
        self._size = size

    def with_source(self, source: str) -> MadeTasks:
        """Return the tasks with the ids that they have in a mixed run; see `task_id`."""
        tasks = copy(self)
        tasks._source = source
        return tasks

    @abstractmethod
    def make(self, index: int) -> Task:
        """Return task ``index``, from 0; the same one every time."""

    def __len__(self) -> int:
        """Return the number of tasks."""
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        """Return a task, or a list of them."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size} in split {self.split!r}")
        task = self.make(index % self._size)
        return replace(task, id=task_id(self._source, task.id)) if self._source else task


class Demonstrator(Protocol):
    """A scripted expert in one episode; see `TaskSet.demonstrator`."""

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the expert's next message, without closing tag or end token's text only if the template adds it."""


class TaskSet(ABC):
    """A source of tasks, registered under the entry-point group ``agentrl.tasks``.

    Built once a run with the configuration's ``tasks.options`` as keyword arguments. Equal options give
    equal tasks, in any process and on any machine.
    """

    @abstractmethod
    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of a split (``train``, ``eval``, …). The sequence may make its tasks on access.

        Raises:
            UnknownNameError: there is no such split.
        """

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        r"""Return documents for a search tool, by corpus name: rows ``{"id", "contents"}``, contents ``"title"\ntext``."""
        return {}

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Demonstrator:
        """Return an expert for supervised fine-tuning on ``task``, with the mistakes that the options set."""
        raise NotImplementedError(f"{type(self).__name__} has no demonstrations to fine-tune on")
