"""The hidden tests in a task's answer."""

from __future__ import annotations

from agentrl import Task, TaskError
from agentrl.rewards.programs import HiddenTests, read_tests


def hidden_tests(task: Task) -> HiddenTests:
    """Return the hidden tests of a task.

    Raises:
        TaskError: its answer is not a set of hidden tests.
    """
    try:
        return read_tests(task.answer)
    except ValueError as error:
        raise TaskError(f"the answer of task {task.id!r}: {error}") from None
