"""The taskset Arithmetic: calculations that are written in words, for a policy with a calculator."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from agentrl import MadeTasks, Message, Task, TaskSet
from agentrl_tasks.faults import check_faults, draw_fault

from .sizes import check_range, check_sizes, check_split

TEMPLATES: tuple[tuple[str, str, Callable[[int, int, int], int]], ...] = (
    ("Multiply {a} by {b}, then add {c}.", "{a} * {b} + {c}", lambda a, b, c: a * b + c),
    ("Multiply {a} by {b}, then subtract {c}.", "{a} * {b} - {c}", lambda a, b, c: a * b - c),
    ("Add {a} and {b}, then multiply by {c}.", "({a} + {b}) * {c}", lambda a, b, c: (a + b) * c),
)
"""Questions, their expressions and values."""
FAULTS = ("guess", "copy", "read")
"""Faults of a demonstration, at most one. guess: it answers without the calculator. copy: a digit of the expression is wrong.
read: a digit of the answer is wrong."""

_DIGIT = re.compile(r"\d")


class Calculations(MadeTasks):
    """Calculations of one split."""

    def __init__(self, split: str, size: int, digits: tuple[int, int], seed: int) -> None:
        super().__init__(split, size)
        self._digits = digits
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return one calculation with its expression and its result."""
        rng = np.random.default_rng([*self._seed, index])
        question, expression, compute = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
        a, b, c = (self._draw(rng) for _ in range(3))
        value = compute(a, b, c)
        numbers = {"a": a, "b": b, "c": c}
        return Task(
            f"arithmetic/{self.split}/{index}",
            (Message("user", question.format(**numbers)),),
            answer=str(value),
            metadata={"expression": expression.format(**numbers)},
        )

    def _draw(self, rng: np.random.Generator) -> int:
        digits = int(rng.integers(self._digits[0], self._digits[1] + 1))
        return int(rng.integers(10 ** (digits - 1), 10**digits))


class Arithmetic(TaskSet):
    """Calculations with three numbers. Splits: ``train`` and ``eval``. The answer is a whole number."""

    def __init__(
        self,
        digits: Sequence[int] = (2, 3),
        tool: str = "calculate",
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the calculations.

        Args:
            digits: lowest and highest number of digits of a number.
            tool: name of the tool that demonstrations call, with the argument ``expression``.
            seed: draws the calculations of ``train``; those of ``eval`` do not depend on it.
            train_size: calculations in ``train``.
            eval_size: calculations in ``eval``.
            faults: probability of each of `FAULTS` in a demonstration.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a fault is unknown.
        """
        self._digits = check_range("digits", digits, 9)
        self._sizes = check_sizes(train_size, eval_size)
        self._tool, self._seed = tool, seed
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)

    def split(self, name: str) -> Calculations:
        """Return the tasks of ``train`` or ``eval``."""
        check_split(name)
        return Calculations(name, self._sizes[name], self._digits, self._seed if name == "train" else 0)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Caller:
        """Return an expert with a fault drawn by the option ``faults``."""
        return Caller(task, self._tool, draw_fault(self._faults, rng), rng)


class Caller:
    """Calls the calculator with the task's expression, and answers with its result."""

    def __init__(self, task: Task, tool: str, fault: str | None, rng: np.random.Generator) -> None:
        self._expression, self._answer = str(task.metadata["expression"]), str(task.answer)
        self._tool, self._fault, self._rng = tool, fault, rng
        self._called = False

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the call, and after that the answer."""
        if self._fault == "guess":
            return _DIGIT.sub(lambda _: str(self._rng.integers(10)), self._answer)
        if self._called:
            result = observation[-1].content
            return change_digit(result, self._rng) if self._fault == "read" else result
        self._called = True
        copied = change_digit(self._expression, self._rng) if self._fault == "copy" else self._expression
        call = json.dumps({"name": self._tool, "arguments": {"expression": copied}})
        return f"<tool_call>\n{call}\n</tool_call>"


def change_digit(text: str, rng: np.random.Generator) -> str:
    """Return a text with one of its digits replaced by another one, never a leading one by 0; without digits the text."""
    digits = list(_DIGIT.finditer(text))
    if not digits:
        return text
    digit = digits[int(rng.integers(len(digits)))]
    leads = digit.start() == 0 or not text[digit.start() - 1].isdigit()
    choices = [number for number in "0123456789"[leads:] if number != digit[0]]
    return text[: digit.start()] + choices[int(rng.integers(len(choices)))] + text[digit.end() :]
