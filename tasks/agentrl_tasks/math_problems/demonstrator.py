"""Scripted experts that solve generated problems with the tool, with faults for a warm start."""

from __future__ import annotations

import json
import re

import numpy as np

from agentrl import Message, Task

FAULTS = ("guess", "method", "copy", "read", "unboxed", "call")
"""Faults of an expert, at most one per episode.

guess: answers without the tool. method: runs a program with a wrong method. copy: copies a digit of the problem wrongly.
read: copies a digit of the result wrongly. unboxed: gives the answer without a box. call: writes an unparsable call, and
then guesses.
"""

_DIGIT = re.compile(r"\d")


class Expert:
    """Calls the tool with the problem's program, and answers with its output in a box."""

    def __init__(self, task: Task, fault: str | None, rng: np.random.Generator) -> None:
        """Solve a generated ``task`` with the ``fault``, one of `FAULTS`, or without."""
        self._program, self._wrong = str(task.metadata["code"]), list(task.metadata["wrong"])
        self._right = str(task.answer)
        self._fault = fault
        self._rng = rng
        self._called = False

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the call, and after that the answer."""
        if self._called or self._fault == "guess":
            return self._answer(observation[-1].content)
        self._called = True
        return self._call(self._code())

    def _code(self) -> str:
        if self._fault == "method":
            return str(self._wrong[int(self._rng.integers(len(self._wrong)))])
        return self._slip(self._program) if self._fault == "copy" else self._program

    def _call(self, code: str) -> str:
        call = json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=False)
        return f"<tool_call>\n{call[:-2] if self._fault == 'call' else call}\n</tool_call>"

    def _answer(self, result: str) -> str:
        if self._fault in ("guess", "call"):
            result = self._guess()
        elif self._fault == "read":
            result = self._slip(result)
        return result if self._fault == "unboxed" else f"\\boxed{{{result}}}"

    def _guess(self) -> str:
        """Return as many random digits as the answer has."""
        return _DIGIT.sub(lambda _: str(self._rng.integers(10)), self._right)

    def _slip(self, text: str) -> str:
        """Return ``text`` with one digit changed, never to a leading 0; without digits, without its last character."""
        digits = list(_DIGIT.finditer(text))
        if not digits:
            return text[:-1]
        digit = digits[int(self._rng.integers(len(digits)))]
        first = digit.start() == 0 or not text[digit.start() - 1].isdigit()
        other_digits = [replacement for replacement in "0123456789"[first:] if replacement != digit[0]]
        return f"{text[: digit.start()]}{other_digits[int(self._rng.integers(len(other_digits)))]}{text[digit.end() :]}"
