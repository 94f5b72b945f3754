"""The hidden tests in a task's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import NonNegativeFloat, TypeAdapter, ValidationError

from agentrl import Task, TaskError


@dataclass(frozen=True, slots=True)
class HiddenTests:
    """``Task.answer`` as data. Example: ``{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}``."""

    inputs: list[str]
    """Standard input, one text per test."""
    outputs: list[str]
    """Expected output, one text per test."""
    compare: Literal["tokens", "lines"] = "tokens"
    """Compare tokens, or whole lines."""
    tolerance: NonNegativeFloat | None = None
    """Allowed difference of numbers."""

    def arguments(self) -> dict[str, Any]:
        """Return the tests as arguments of the judge."""
        rule = {"compare": self.compare} | ({} if self.tolerance is None else {"tolerance": self.tolerance})
        return {"inputs": self.inputs, "outputs": self.outputs, **rule}


_TESTS = TypeAdapter(HiddenTests)


def hidden_tests(task: Task) -> HiddenTests:
    """Return the hidden tests of a task.

    Raises:
        TaskError: its answer is not a set of hidden tests.
    """
    answer = task.answer
    try:
        tests = _TESTS.validate_python(answer if isinstance(answer, Mapping) else {})
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(key) for key in fault["loc"])
        raise TaskError(f"task {task.id!r}: its answer holds no hidden tests: {where}: {fault['msg']}") from None
    if not tests.inputs or len(tests.inputs) != len(tests.outputs):
        raise TaskError(f"task {task.id!r} has {len(tests.inputs)} hidden inputs and {len(tests.outputs)} outputs")
    return tests
