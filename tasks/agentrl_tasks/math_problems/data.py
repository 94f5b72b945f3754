"""The taskset: generated problems, or those of DAPO-Math-17k and GSM8K files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, unknown_name
from agentrl.data.files import Files, check_files, file_paths
from agentrl.data.rows import Row, read_rows
from agentrl_tasks.faults import check_faults, draw_fault

from .demonstrator import FAULTS, Expert
from .families import FAMILIES
from .generated import Generated
from .rows import COLUMNS, FORMATS, Published, detect_format

SPLITS = ("train", "eval")


class Problems(MadeTasks):
    """The tasks of published rows, created on access."""

    def __init__(self, split: str, problems: Sequence[Published]) -> None:
        """Take ``problems`` in their order."""
        super().__init__(split, len(problems))
        self._problems = problems

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        problem = self._problems[index]
        return Task(
            id=f"math_problems/{self.split}/{index}",
            prompt=(Message("user", problem.question),),
            answer=problem.answer,
            metadata={"data_source": problem.source, "index": problem.index},
        )


class MathProblems(TaskSet):
    """Problems with one answer. Splits: ``train`` and ``eval``.

    Without files, problems are generated, and none is in both splits. Files are read on the first access to a split.
    """

    def __init__(  # the keys of tasks.options
        self,
        train: Files | None = None,
        eval: Files | None = None,
        format: str = "auto",
        families: Sequence[str] = tuple(FAMILIES),
        levels: Sequence[int] = (1, 2, 3, 4),
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose files or generated problems.

        Args:
            train: JSONL or parquet files to train on.
            eval: JSONL or parquet files to evaluate on. With ``train`` files and without these there is no evaluation.
            format: ``dapo``, ``gsm8k``, or ``auto`` for detection by each file's first row.
            families: kinds of generated problems, which alternate.
            levels: numbers of operations that generated problems may take, of 1 to 4.
            seed: draws the generated problems of ``train``; those of ``eval`` do not depend on it.
            train_size: generated problems in ``train``.
            eval_size: generated problems in ``eval``.
            faults: probability of each of `FAULTS` in a demonstration; the others are without fault.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a format, family or fault is unknown.
        """
        self._files = {"train": file_paths(train), "eval": file_paths(eval)}
        if format != "auto" and format not in FORMATS:
            raise unknown_name("format", format, ("auto", *FORMATS), "tasks.options.format")
        self._format = format
        _check_generated(families, levels, train_size, eval_size)
        self._families, self._levels, self._seed = tuple(families), tuple(levels), seed
        self._sizes = {"train": train_size, "eval": eval_size}
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)
        self._splits: dict[str, Sequence[Task]] = {}

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of ``train`` or ``eval``.

        Raises:
            MissingError: a file does not exist.
            ConfigError: only ``eval`` has files, a file holds no rows, or a row is invalid; the message states where.
        """
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS, "tasks.train_split, tasks.eval_split")
        if name not in self._splits:
            self._splits[name] = self._read(name) if any(self._files.values()) else self._generate(name)
        return self._splits[name]

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Expert:
        """Return an expert for a generated ``task``, with a fault drawn by the option ``faults``.

        Raises:
            NotImplementedError: the task is from a file, without a program that solves it.
        """
        if "code" not in task.metadata:
            raise NotImplementedError(
                f"task {task.id!r} comes from a file: only generated problems have demonstrations"
            )
        return Expert(task, draw_fault(self._faults, rng), rng)

    def _generate(self, name: str) -> Generated:
        seed = self._seed if name == "train" else 0
        return Generated(name, self._sizes[name], self._families, self._levels, seed)

    def _read(self, name: str) -> Problems:
        check_files(self._files)
        if name == "train" and not self._files[name]:
            raise ConfigError("tasks.options.eval names files and tasks.options.train none: give it files too")
        read = (self._problems(path, f"tasks.options.{name}") for path in self._files[name])
        return Problems(name, list(chain.from_iterable(read)))

    def _problems(self, path: Path, key: str) -> list[Published]:
        parse: Callable[[Row], Published] | None = FORMATS.get(self._format)
        problems = []
        for row in read_rows(path, key, COLUMNS):
            parse = parse or FORMATS[detect_format(row)]
            problems.append(parse(row))
        if not problems:
            raise ConfigError(f"{key}={path}: the file holds no rows")
        return problems


def _check_generated(families: Sequence[str], levels: Sequence[int], train_size: int, eval_size: int) -> None:
    if not families:
        raise ConfigError(f"tasks.options.families is empty: name some of {', '.join(FAMILIES)}")
    for family in families:
        if family not in FAMILIES:
            raise unknown_name("family", family, FAMILIES, "tasks.options.families")
        if not set(levels) & set(FAMILIES[family].levels):
            has = ", ".join(map(str, FAMILIES[family].levels))
            raise ConfigError(f"tasks.options.levels={list(levels)}: family {family!r} has none of them; it has {has}")
    if not set(levels) <= {1, 2, 3, 4}:
        raise ConfigError(f"tasks.options.levels={list(levels)}: name some of 1, 2, 3 and 4")
    if train_size < 1 or eval_size < 1:
        raise ConfigError(f"tasks.options: {train_size=} and {eval_size=} must be greater than 0")
