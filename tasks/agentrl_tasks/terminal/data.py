"""The taskset: exercises that are made from a seed, as folders in Harbor's format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, unknown_name
from agentrl.data.task_folders import read_task_folder

from .exercise import Exercise
from .kinds import KINDS, PRACTICE

SHIPPED = Path(__file__).with_name("shipped")
"""One folder of each kind."""
HELD_OUT = 8
"""One of so many exercises of a kind is held out."""


def cache_folder() -> Path:
    """Return where folders of exercises are kept: ``agentrl/terminal`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "terminal"


def is_held_out(exercise: Exercise) -> bool:
    """Return whether an exercise is for evaluation: by a hash of all its files, so that no exercise is in both splits."""
    return int(exercise.digest(), 16) % HELD_OUT == 0


def make_exercise(kind: str, split: str, seed: int, number: int) -> Exercise:
    """Return exercise ``number`` of a kind, of `KINDS` or `PRACTICE`; the same one every time."""
    rng = Random(f"{seed}/{split}/{kind}/{number}")
    make = {**KINDS, **PRACTICE}[kind]
    while True:
        exercise = make(rng)
        if is_held_out(exercise) == (split == "eval"):
            return exercise


class Exercises(MadeTasks):
    """The exercises of a split; the folder of each is written on access."""

    def __init__(self, split: str, size: int, seed: int, kinds: Sequence[str], folder: Path) -> None:
        super().__init__(split, size)
        self._seed, self._kinds, self._folder = seed, kinds, folder

    def exercise(self, index: int) -> Exercise:
        """Return exercise ``index``: kinds alternate."""
        number, kind_index = divmod(index, len(self._kinds))
        return make_exercise(self._kinds[kind_index], self.split, self._seed, number)

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        exercise = self.exercise(index)
        folder = self._folder / f"{exercise.kind}-{exercise.digest()}"
        if not folder.is_dir():
            exercise.write(folder)
        row = read_task_folder(folder)
        assert isinstance(row["metadata"], dict)
        return Task(
            id=f"terminal/{self.split}/{exercise.kind}-{index // len(self._kinds)}",
            prompt=(Message("user", str(row["prompt"])),),
            metadata=row["metadata"],
        )


class TerminalExercises(TaskSet):
    """Exercises of `KINDS`, made from a seed; one of eight is held out for the split ``eval``."""

    def __init__(
        self,
        kinds: Sequence[str] | None = None,
        train_size: int = 400,
        eval_size: int = 50,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        """Choose the exercises.

        Args:
            kinds: names of `KINDS`, which alternate; by default all.
            train_size: exercises to train on.
            eval_size: exercises to evaluate on, which do not depend on the seed.
            seed: draws those to train on.
            folder: where the tasks' folders are written; by default below the cache folder.

        Raises:
            ConfigError: there is no such kind, or no kind.
        """
        self._kinds = tuple(KINDS if kinds is None else kinds)
        for kind in self._kinds:
            if kind not in KINDS:
                raise unknown_name("kind of exercise", kind, KINDS, "tasks.options.kinds")
        if not self._kinds:
            raise ConfigError("tasks.options.kinds=[]: name at least one kind, or leave it out for all")
        for key, size in (("train_size", train_size), ("eval_size", eval_size)):
            if size < 0:
                raise ConfigError(f"tasks.options.{key}={size} is negative")
        self._sizes = {"train": (train_size, seed), "eval": (eval_size, 0)}
        self._folder = (cache_folder() if folder is None else Path(folder).expanduser()).resolve()

    def split(self, name: str) -> Sequence[Task]:
        """Return the exercises of ``train`` or ``eval``.

        Raises:
            UnknownNameError: it is another name.
        """
        if name not in self._sizes:
            raise unknown_name("split", name, self._sizes, "tasks.train_split, tasks.eval_split")
        size, seed = self._sizes[name]
        return Exercises(name, size, seed, self._kinds, self._folder)
