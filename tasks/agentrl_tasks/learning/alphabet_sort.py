"""The taskset AlphabetSort: lists of names that grow from turn to turn and are to be kept in order."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet
from agentrl_tasks.faults import check_faults, draw_fault

from .sizes import check_range, check_sizes, check_split
from .words import FIRST_NAMES, LAST_NAMES

NEW = " (new)"
"""Behind a name that came with the last turn."""
FIRST_TURN = "Sort these names by {key} name, one on each line:\n"
NEXT_TURN = "Add these names to the list, keep it in order, and write (new) behind each of them:\n"
FAULTS = ("order", "append", "unmarked", "missing")
"""Faults of a turn of a demonstration, at most one: two neighbours are swapped, new names come last, none is marked as new, or
one is missing. A turn in which a fault changes nothing has none."""


class Lists(MadeTasks):
    """Lists of one split."""

    def __init__(self, split: str, size: int, turns: tuple[int, int], names: tuple[int, int], seed: int) -> None:
        super().__init__(split, size)
        self._turns, self._names = turns, names
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return one list, with what the user says in each turn and the right answers."""
        rng = np.random.default_rng([*self._seed, index])
        key = "first" if rng.random() < 0.5 else "last"
        turns = int(rng.integers(self._turns[0], self._turns[1] + 1))
        counts = rng.integers(self._names[0], self._names[1] + 1, size=turns)
        # No name comes twice, neither first nor last: the order is always defined.
        firsts = rng.permutation(len(FIRST_NAMES))[: counts.sum()]
        lasts = rng.permutation(len(LAST_NAMES))[: counts.sum()]
        names = [f"{FIRST_NAMES[first]} {LAST_NAMES[last]}" for first, last in zip(firsts, lasts, strict=True)]
        says, answers, start = [], [], 0
        for turn, count in enumerate(counts):
            added = names[start : start + int(count)]
            start += int(count)
            ranked = sorted(names[:start], key=lambda name: name.split()[key == "last"])
            answers.append("\n".join(name + NEW * (turn > 0 and name in added) for name in ranked))
            says.append((NEXT_TURN if turn else FIRST_TURN.format(key=key)) + "\n".join(added))
        return Task(
            f"alphabet_sort/{self.split}/{index}",
            (Message("user", says[0]),),
            answer=answers,
            metadata={"user_turns": says[1:], "turns": turns},
        )


class AlphabetSort(TaskSet):
    """Names to sort in several turns. Splits: ``train`` and ``eval``. For the environment ``AlphabetSortEnv``."""

    def __init__(
        self,
        turns: Sequence[int] = (1, 3),
        names: Sequence[int] = (1, 4),
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the lists.

        Args:
            turns: lowest and highest number of turns.
            names: lowest and highest number of names that come with a turn.
            seed: draws the lists of ``train``; those of ``eval`` do not depend on it.
            train_size: lists in ``train``.
            eval_size: lists in ``eval``.
            faults: probability of each of `FAULTS` in each turn of a demonstration.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a fault is unknown.
        """
        self._turns, self._names = check_range("turns", turns, 10), check_range("names", names, 10)
        if self._turns[1] * self._names[1] > len(FIRST_NAMES):
            raise ConfigError(
                f"tasks.options: {self._turns[1]} turns of {self._names[1]} names need more than {len(FIRST_NAMES)} names"
            )
        self._sizes = check_sizes(train_size, eval_size)
        self._seed = seed
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)

    def split(self, name: str) -> Lists:
        """Return the tasks of ``train`` or ``eval``."""
        check_split(name)
        return Lists(name, self._sizes[name], self._turns, self._names, self._seed if name == "train" else 0)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Sorter:
        """Return an expert, each of whose turns has a fault drawn by the option ``faults``."""
        return Sorter(task.answer, self._faults, rng)


class Sorter:
    """Answers each turn with the sorted list, with a fault or without."""

    def __init__(self, answers: Sequence[str], faults: Mapping[str, float], rng: np.random.Generator) -> None:
        self._answers = iter(answers)
        self._faults, self._rng = faults, rng

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the list."""
        lines = next(self._answers).split("\n")
        fault = draw_fault(self._faults, self._rng)
        if fault == "order" and len(lines) > 1:
            index = int(self._rng.integers(len(lines) - 1))
            lines[index : index + 2] = lines[index + 1], lines[index]
        elif fault == "append":
            lines.sort(key=lambda line: line.endswith(NEW))
        elif fault == "unmarked":
            lines = [line.removesuffix(NEW) for line in lines]
        elif fault == "missing" and len(lines) > 1:
            del lines[int(self._rng.integers(len(lines)))]
        return "\n".join(lines)
