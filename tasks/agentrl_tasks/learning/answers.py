"""The taskset OwnAnswers: tasks of an environment whose own answers are demonstrated, with wrong digits or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl import ConfigError, Message, Task, TaskSet
from agentrl.core.registry import env_class
from agentrl_tasks.faults import check_faults, draw_fault

from .arithmetic import change_digit

FAULTS = ("digit", "guess")
"""Faults of a demonstration, at most one: one digit is wrong, or all are drawn."""


class OwnAnswers(TaskSet):
    """Tasks of an environment that has them, and knows their answers, such as ``reasoning_gym``."""

    def __init__(
        self,
        env: str,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Take the environment by name, with the options that choose its tasks.

        Args:
            env: its name, as in ``env.name``.
            options: as ``env.options``.
            seed: decides about the tasks, if the environment's options have no ``seed``.
            faults: probability of each of `FAULTS` in a demonstration.

        Raises:
            UnknownNameError: there is no such environment, or a fault is unknown.
            ConfigError: the probabilities are none.
        """
        self._env = env_class(env, "tasks.options.env")
        self._options = dict(options or {})
        self._seed = seed
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)

    def split(self, name: str) -> Sequence[Task]:
        """Return the environment's tasks of a split."""
        return self._env.configured_tasks(name, self._seed, self._options)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Teller:
        """Return an expert with a fault drawn by the option ``faults``.

        Raises:
            ConfigError: the task has no answer.
        """
        if task.answer is None:
            raise ConfigError(
                f"tasks.options.env={self._env.__name__}: its task {task.id} has no answer to demonstrate"
            )
        return Teller(str(task.answer), draw_fault(self._faults, rng), rng)


class Teller:
    """Says the answer."""

    def __init__(self, answer: str, fault: str | None, rng: np.random.Generator) -> None:
        self._answer, self._fault, self._rng = answer, fault, rng

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the answer."""
        if self._fault == "digit":
            return change_digit(self._answer, self._rng)
        if self._fault == "guess":
            return "".join(str(self._rng.integers(10)) if letter.isdigit() else letter for letter in self._answer)
        return self._answer
