"""What adapters share: tasks that differ in nothing but their seeds, and texts of turns, observations and actions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from typing_extensions import override

from agentrl.core.errors import ConfigError
from agentrl.core.images import IMAGE_MARK, Image, without_marks
from agentrl.core.imports import load_object
from agentrl.core.task import MadeTasks, Task
from agentrl.core.types import THINK_END, Message

Json = dict[str, Any]
"""A JSON object."""

Function = Callable[..., Any]
"""A function of the user."""

SEEDED_TASKS = 1000
"""Tasks of a split."""
_ANSWER = re.compile(r"<action>(.*?)</action>", re.DOTALL)


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


def value_text(value: object, digits: int) -> str:
    """Return a value of an observation as a text.

    A text is itself. A dict has a line ``key: value`` for each of its values. Everything else is JSON: numbers, and lists of
    them by axis.

    Args:
        value: of the environment.
        digits: significant digits of fractions.
    """
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {value_text(member, digits)}" for key, member in value.items())
    return value if isinstance(value, str) else json.dumps(to_json(value, digits), ensure_ascii=False)


def to_json(value: object, digits: int) -> object:
    """Return a value as what JSON can say: arrays as lists, fractions with ``digits`` significant digits."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): to_json(member, digits) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(member, digits) for member in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    return value


class ActionError(ValueError):
    """A text that is no action; the message is for the policy, and says what is wrong with it."""


def tagged_answer(text: str) -> str:
    """Return what the last ``<action>…</action>`` of a text holds; without a tag the text.

    Raises:
        ActionError: it is empty.
    """
    answers = _ANSWER.findall(text)
    answer = (answers[-1] if answers else text).strip()
    if not answer:
        raise ActionError("the answer is empty")
    return str(answer)


def read_json(answer: str) -> object:
    """Return the value of a text of JSON.

    Raises:
        ActionError: it is none.
    """
    try:
        value: object = json.loads(answer)
        return value
    except (ValueError, RecursionError):
        raise ActionError(f"{answer!r:.100} is no JSON") from None


def opening(prompt: tuple[Message, ...], *texts: str, image: Image | None = None) -> tuple[Message, ...]:
    """Return the first messages of an episode: a prompt whose last message continues with ``texts``, empty ones left out.

    Args:
        prompt: the messages of the task.
        texts: what follows in the last of them.
        image: follows ``texts``.
    """
    *earlier, last = prompt or (Message("user", ""),)
    images = (*last.images, *(() if image is None else (image,)))
    content = last.content if last.images or not images else without_marks(last.content)
    if images:
        texts = (*map(without_marks, texts), *(() if image is None else (IMAGE_MARK,)))
    return (*earlier, Message(last.role, "\n\n".join(filter(None, (content, *texts))), images=images))


class InvalidTurns:
    """Turns that are no actions: the policy reads what is wrong, and some of them in a row end the episode.

    Args:
        cost: of each, taken from the reward.
        most: in a row, with the last of which the episode ends.
        rule: the sentence that explains how to write an action; empty if there is none.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, cost: float, most: int, rule: str = "") -> None:
        if most < 1:
            raise ConfigError(f"env.options.max_invalid={most} must be at least 1")
        if cost < 0:
            raise ConfigError(f"env.options.invalid_cost={cost} must not be negative")
        self.count = 0
        """Messages of the episode."""
        self._cost, self._most, self._rule = cost, most, rule
        self._in_row = 0

    def clear(self) -> None:
        """Begin an episode."""
        self.count = self._in_row = 0

    def end_row(self) -> None:
        """Begin a new row, after a turn that is an action."""
        self._in_row = 0

    def refuse(self, fault: str) -> tuple[Message, float, bool]:
        """Count a turn; return the message that answers it, its reward, and whether the episode ends."""
        self.count += 1
        self._in_row += 1
        text = " ".join(filter(None, (f"That is no action: {fault}.", self._rule)))
        return Message("user", text), 0.0 - self._cost, self._in_row >= self._most


@cache
def load_function(reference: str, key: str) -> Function:
    """Return the function of a reference, ``file.py:function``.

    Raises:
        ConfigError: there is none.
    """
    function = load_object(reference, key)
    if not callable(function):
        raise ConfigError(f"{key}={reference} is a {type(function).__name__}, and no function")
    return function  # type: ignore[no-any-return]
