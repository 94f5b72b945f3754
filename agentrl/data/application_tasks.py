"""Tasks that an application brings with its sessions (``rollout.agent.tasks=application``): the run has placeholders for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import overload

from typing_extensions import override

from agentrl.core.data_source import DataSource
from agentrl.core.task import Task, task_id
from agentrl.core.types import Message

APPLICATION_TASK = "application_task"
"""Key of a task's metadata, and of its rollouts', with the id that the application has given it; empty in a placeholder."""


class Placeholders(Sequence[Task]):
    """The tasks of a source to train on, if an application brings them: none is known before.

    Args:
        source: its name in a mixed run; else empty.
    """

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        """Return 0."""
        return 0

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        """Return no task."""
        return ()[index]


class ApplicationTasks(DataSource):
    """Placeholders without end, such as ``application-17``. A session of the application replaces one: see `fill_placeholder`.

    Args:
        tasks: of the source.
        seed: ``run.seed``.
    """

    def __init__(self, tasks: Placeholders, seed: int) -> None:
        super().__init__(tasks, seed)
        self._source = tasks.source
        self._position = 0
        """Placeholders taken since the run's start."""

    @override
    def get_samples(self, num_samples: int) -> Sequence[Task]:
        first, self._position = self._position, self._position + num_samples
        return [
            Task(task_id(self._source, f"application-{number}"), (), metadata={APPLICATION_TASK: ""})
            for number in range(first, self._position)
        ]

    @override
    def state(self) -> dict[str, int]:
        return {"position": self._position}

    @override
    def load_state(self, state: Mapping[str, int]) -> None:
        self._position = state["position"]


def is_placeholder(task: Task) -> bool:
    """Return whether the application brings what the task is."""
    return task.metadata.get(APPLICATION_TASK) == ""


def fill_placeholder(
    placeholder: Task, name: str, prompt: Sequence[Message], answer: object, metadata: Mapping[str, object]
) -> Task:
    """Return a task of the application. Its id is the placeholder's: the application may bring a task again, as another group.

    Args:
        placeholder: in whose place it is played.
        name: the application's id of the task, in the metadata as `APPLICATION_TASK`.
        prompt: its messages; may be empty.
        answer: of the task, for the reward function.
        metadata: of the task.
    """
    return replace(placeholder, prompt=tuple(prompt), answer=answer, metadata={**metadata, APPLICATION_TASK: name})
