"""The taskset ReverseText: words that are to be written backwards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from agentrl import MadeTasks, Message, Task, TaskSet
from agentrl_tasks.faults import check_faults, draw_fault

from .sizes import check_range, check_sizes, check_split
from .words import WORDS

PROMPT = "Write this text backwards, letter by letter:\n"
FAULTS = ("drop", "swap", "words", "copy")
"""Faults of a demonstration, at most one: it leaves out a letter, swaps two neighbours, reverses only the order of the words, or
copies the text."""


class Texts(MadeTasks):
    """Texts of one split."""

    def __init__(self, split: str, size: int, words: tuple[int, int], seed: int) -> None:
        super().__init__(split, size)
        self._words = words
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return one text."""
        rng = np.random.default_rng([*self._seed, index])
        count = int(rng.integers(self._words[0], self._words[1] + 1))
        text = " ".join(WORDS[int(number)] for number in rng.integers(len(WORDS), size=count))
        return Task(f"reverse_text/{self.split}/{index}", (Message("user", PROMPT + text),), answer=text[::-1])


class ReverseText(TaskSet):
    """Short texts of common words. Splits: ``train`` and ``eval``. The answer is the text backwards."""

    def __init__(
        self,
        words: Sequence[int] = (2, 4),
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the texts.

        Args:
            words: lowest and highest number of words of a text.
            seed: draws the texts of ``train``; those of ``eval`` do not depend on it.
            train_size: texts in ``train``.
            eval_size: texts in ``eval``.
            faults: probability of each of `FAULTS` in a demonstration.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a fault is unknown.
        """
        self._words = check_range("words", words, 20)
        self._sizes = check_sizes(train_size, eval_size)
        self._seed = seed
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)

    def split(self, name: str) -> Texts:
        """Return the tasks of ``train`` or ``eval``."""
        check_split(name)
        return Texts(name, self._sizes[name], self._words, self._seed if name == "train" else 0)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Writer:
        """Return an expert with a fault drawn by the option ``faults``."""
        return Writer(str(task.answer), draw_fault(self._faults, rng), rng)


class Writer:
    """Writes the text backwards, with a fault or without."""

    def __init__(self, answer: str, fault: str | None, rng: np.random.Generator) -> None:
        self._answer, self._fault, self._rng = answer, fault, rng

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the answer."""
        answer = self._answer
        if self._fault == "copy":
            return answer[::-1]
        if self._fault == "words":
            return " ".join(answer[::-1].split()[::-1])
        if self._fault is None:
            return answer
        index = int(self._rng.integers(len(answer) - 1))
        swapped = answer[index + 1] + answer[index] if self._fault == "swap" else answer[index + 1]
        return answer[:index] + swapped + answer[index + 2 :]
