"""What adapters share: tasks that differ in nothing but their seeds, and texts of turns."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from agentrl.core.task import MadeTasks, Task
from agentrl.core.types import THINK_END, Message

Json = dict[str, Any]
"""A JSON object."""

SEEDED_TASKS = 1000
"""Tasks of a split."""


class SeededTasks(MadeTasks):
    """Tasks without a prompt. The seed of their episodes, which the run derives from the id, decides about the problem.

    Args:
        name: begins the ids, such as ``textarena/train/17``.
        split: the split's name.
        size: number of tasks.
    """

    def __init__(self, name: str, split: str, size: int = SEEDED_TASKS) -> None:
        super().__init__(split, size)
        self._name = name

    @override
    def make(self, index: int) -> Task:
        return Task(f"{self._name}/{self.split}/{index}", ())


def text_after_reasoning(message: Message) -> str:
    """Return the text of a turn behind its reasoning, without white space around it."""
    return message.content.rpartition(THINK_END)[2].strip()
