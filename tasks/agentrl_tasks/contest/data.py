"""The taskset: generated problems, or files of published ones."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, unknown_name
from agentrl.data.files import Files, check_files, file_paths
from agentrl.data.rows import read_rows

from .classics import CLASSICS
from .demonstrator import SLIPS, Programmer
from .lists import draw_lists
from .problem import Example, Problem, examples
from .rows import COLUMNS, FunctionStyle, parse_row

FAMILIES: Mapping[str, Callable[[Random], Problem]] = {"lists": draw_lists, **CLASSICS}
"""Kinds of generated problems, by name."""
Functions = Literal["refuse", "skip"]
"""Treatment of rows whose tests call a function."""


def is_held_out(problem: Problem) -> bool:
    """Return whether a problem belongs to ``eval`` (one in five of a family) or to the other splits."""
    return zlib.crc32(f"held out? {problem.key}".encode()) % 5 == 0


class Generated(MadeTasks):
    """The tasks of a split, each generated from a separate seed on access."""

    def __init__(self, name: str, size: int, seed: int, families: Sequence[str], public: int, hidden: int) -> None:
        """See `Contest` for the arguments."""
        super().__init__(name, size)
        self._seed = seed
        self._families, self._public, self._hidden = tuple(families), public, hidden

    def problem(self, index: int) -> tuple[Problem, Random]:
        """Return the problem of a task, and the random generator that draws its tests."""
        rng = Random(f"contest/{self._seed}/{self.split}/{index}")
        draw = FAMILIES[self._families[index % len(self._families)]]
        while True:
            problem = draw(rng)
            if is_held_out(problem) == (self.split == "eval"):
                return problem, rng

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        problem, rng = self.problem(index)
        drawn = examples(problem, rng, self._public + self._hidden)
        public, hidden = drawn[: self._public], drawn[self._public :]
        return Task(
            id=f"contest/{self.split}/{index}",
            prompt=(Message("user", with_examples(problem.statement, public)),),
            answer=as_answer(hidden or public),
            metadata={"family": problem.family, "index": index, "split": self.split},
        )


class Contest(TaskSet):
    """Programming problems with hidden tests, for the environment ``code_contest``.

    Splits: ``train``, ``validation`` (further tasks of the same problems) and ``eval``, whose problems are in no other
    split. The options ``train`` and ``eval`` name files of published rows, which replace generated problems.
    """

    def __init__(  # the keys of tasks.options
        self,
        seed: int = 0,
        families: Sequence[str] = ("lists",),
        train_size: int = 100_000,
        eval_size: int = 384,
        public: int = 1,
        hidden: int = 5,
        slips: float = 0.0,
        train: Files | None = None,
        eval: Files | None = None,
        max_tests: int = 20,
        functions: Functions = "refuse",
    ) -> None:
        """Choose generated problems or files.

        Args:
            seed: draws the generated problems of ``train`` and ``validation``, and all tests.
            families: kinds of generated problems, which alternate; see `FAMILIES`.
            train_size: generated problems in ``train``.
            eval_size: generated problems in ``eval`` and in ``validation``.
            public: examples in the statement of a generated problem.
            hidden: hidden tests of a generated problem.
            slips: fraction of demonstrations with one of `SLIPS`.
            train: JSONL or parquet files to train on.
            eval: JSONL or parquet files to evaluate on; without any there is no evaluation.
            max_tests: number of hidden tests of a published problem to keep, from the first.
            functions: raise an error for rows whose tests call a function (``refuse``), or ``skip`` them.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a family does not exist.
        """
        for name in families:
            if name not in FAMILIES:
                raise unknown_name("family", name, FAMILIES, "tasks.options.families")
        sizes = {"train_size": train_size, "eval_size": eval_size, "hidden": hidden, "max_tests": max_tests}
        if min(*sizes.values(), public + 1, len(families)) < 1:
            raise ConfigError(
                f"tasks.options: {sizes} must be at least 1, public={public} at least 0, families not empty"
            )
        if not 0 <= slips <= 1:
            raise ConfigError(f"tasks.options.slips={slips} is a share, from 0 to 1")
        if functions not in ("refuse", "skip"):
            raise ConfigError(f"tasks.options.functions={functions!r} is neither refuse nor skip")
        self._made = (seed, families, public, hidden)
        self._sizes = {"train": train_size, "validation": eval_size, "eval": eval_size}
        self._slips, self._max_tests, self._functions = slips, max_tests, functions
        self._files = {"train": file_paths(train), "eval": file_paths(eval)}
        self._read: dict[str, Sequence[Task]] = {}

    @property
    def _has_files(self) -> bool:
        return any(self._files.values())

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of a split.

        Raises:
            UnknownNameError: the split does not exist.
            MissingError: a file does not exist.
            ConfigError: a row is invalid; the message states where.
        """
        splits = self._files if self._has_files else self._sizes
        if name not in splits:
            raise unknown_name("split", name, splits, "tasks.train_split, tasks.eval_split")
        if not self._has_files:
            return self._generate(name)
        if name not in self._read:
            self._check_files()
            self._read[name] = [task for path in self._files[name] for task in self._tasks(path, name)]
        return self._read[name]

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Programmer:
        """Return an expert for a generated task; with the option ``slips`` some experts fail."""
        if self._has_files:
            raise NotImplementedError(
                "published problems have no demonstrations; leave tasks.options.train and eval out"
            )
        problem = self.problem(task)
        slip = str(rng.choice(SLIPS)) if rng.random() < self._slips else None
        return Programmer(problem, slip)

    def problem(self, task: Task) -> Problem:
        """Return the problem of a generated task, reference solution included."""
        problem, _ = self._generate(task.metadata["split"]).problem(task.metadata["index"])
        return problem

    def _generate(self, name: str) -> Generated:
        seed, families, public, hidden = self._made
        return Generated(name, self._sizes[name], seed, families, public, hidden)

    def _check_files(self) -> None:
        if not self._files["train"]:
            raise ConfigError("tasks.options.eval is set and tasks.options.train is not; name JSONL or parquet files")
        check_files(self._files)

    def _tasks(self, path: Path, name: str) -> Iterator[Task]:
        for row in read_rows(path, f"tasks.options.{name}", COLUMNS):
            try:
                problem = parse_row(row)
            except FunctionStyle:
                if self._functions == "refuse":
                    raise
                continue
            hidden = problem.hidden[: self._max_tests]
            yield Task(
                id=f"contest/{name}/{path.name}:{row.number}",
                prompt=(Message("user", problem.statement),),
                answer=as_answer(hidden),
                metadata={"family": path.stem, **problem.metadata},
            )


def with_examples(statement: str, shown: Sequence[Example]) -> str:
    """Return a statement followed by examples."""
    parts = (f"\n\nInput:\n{example.input.rstrip()}\nOutput:\n{example.output.rstrip()}" for example in shown)
    return statement + "".join(parts)


def as_answer(hidden: Sequence[Example]) -> dict[str, Any]:
    """Return tests in the format of ``Task.answer``."""
    return {"inputs": [test.input for test in hidden], "outputs": [test.output for test in hidden]}
