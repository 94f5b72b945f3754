"""The taskset: files of published rows as tasks for the environment ``search_r1``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from agentrl.core.errors import ConfigError, MissingError, unknown_name
from agentrl.core.task import MadeTasks, Task, TaskSet
from agentrl.core.types import Message
from agentrl.data.rows import read_rows

from .rows import COLUMNS, Question, parse_row

Files = str | Path | Sequence[str | Path]
"""One file or several."""


class Questions(MadeTasks):
    """The tasks of a split, each made when it is asked for: of a hundred thousand rows only the few words are kept."""

    def __init__(self, split: str, questions: Sequence[Question], order: Sequence[int]) -> None:
        """Ask ``questions`` in ``order``; a task's name is its place in the files, whatever the order."""
        super().__init__(split, len(order))
        self._questions, self._order = questions, order

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        number = self._order[index]
        asked = self._questions[number]
        return Task(
            id=f"search_qa/{self.split}/{number}",
            prompt=(Message("user", asked.text),),
            answer=list(asked.answers),
            metadata={"data_source": asked.source, "index": asked.index},
        )


class SearchQa(TaskSet):
    """Questions with short answers, to be found by searching.

    Splits: ``train`` in the files' order, and ``eval``, in which the data sources take turns, so that the first
    ``eval.size`` tasks are of all of them. Files are read when a split is first asked for.
    """

    def __init__(self, train: Files | None = None, eval: Files | None = None, corpus: str | Path | None = None) -> None:
        """Name the files.

        Args:
            train: JSONL or parquet files to train on.
            eval: JSONL or parquet files to evaluate on; without any nothing is evaluated.
            corpus: a JSONL file of documents ``{"id", "contents"}`` for the search server; a large one is better given to
                the server itself, as ``tools.search.options.corpus``, than copied into the run's folder.

        """
        self._files = {"train": _paths(train), "eval": _paths(eval)}
        self._corpus = Path(corpus).expanduser() if corpus is not None else None
        self._splits: dict[str, Questions] = {}

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of ``train`` or ``eval``.

        Raises:
            MissingError: a file of either is not there.
            ConfigError: ``train`` has no files, a file holds no rows, or a row does not fit; the message says where.

        """
        if name not in self._files:
            raise unknown_name("split", name, self._files, "tasks.train_split, tasks.eval_split")
        if name not in self._splits:
            self._check_files()
            self._splits[name] = self._read(name)
        return self._splits[name]

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        """Return the documents of the option ``corpus``; the search server checks them."""
        return {"default": _documents(self._corpus)} if self._corpus is not None else {}

    def _check_files(self) -> None:
        named = {**self._files, "corpus": _paths(self._corpus)}
        lacks = [
            f"tasks.options.{option}={path}: there is no such file"
            for option, paths in named.items()
            for path in paths
            if not path.is_file()
        ]
        if lacks:
            raise MissingError("\n".join(lacks))

    def _read(self, name: str) -> Questions:
        key = f"tasks.options.{name}"
        if name == "train" and not self._files[name]:
            raise ConfigError(f"{key} is not set: give it a JSONL or parquet file of questions, or a list of them")
        questions = list(chain.from_iterable(_questions(path, key) for path in self._files[name]))
        order = range(len(questions)) if name == "train" else in_turn([question.source for question in questions])
        return Questions(name, questions, order)


def in_turn(sources: Sequence[str]) -> Sequence[int]:
    """Return all places in ``sources``, one of each source after the other until none has any left."""
    seen: dict[str, int] = {}
    rounds = []
    for source in sources:
        seen[source] = seen.get(source, -1) + 1
        rounds.append(seen[source])
    return sorted(range(len(sources)), key=rounds.__getitem__)


def _questions(path: Path, key: str) -> list[Question]:
    found = [parse_row(row) for row in read_rows(path, key, COLUMNS)]
    if not found:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    return found


def _documents(path: Path) -> Iterator[Mapping[str, str]]:
    for row in read_rows(path, "tasks.options.corpus"):
        for field in ("id", "contents"):
            if field not in row.values:
                raise ConfigError(f"{row.place} has no {field!r}; it has: {', '.join(row.columns) or 'nothing'}")
        yield {"id": str(row.values["id"]), "contents": row.values["contents"]}


def _paths(files: Files | None) -> list[Path]:
    if files is None:
        return []
    return [Path(file).expanduser() for file in ([files] if isinstance(files, str | Path) else files)]
