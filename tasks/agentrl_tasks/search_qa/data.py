"""The taskset: files of published rows as tasks for the environment ``search_r1``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, unknown_name
from agentrl.data.files import Files, check_files, file_paths
from agentrl.data.rows import read_rows

from .rows import COLUMNS, Question, parse_row


class Questions(MadeTasks):
    """The tasks of a split, created on access, so that of each row only the question is kept in memory."""

    def __init__(self, split: str, questions: Sequence[Question], order: Sequence[int]) -> None:
        """Take ``questions`` in ``order``; a task's id is its position in the files, independent of the order."""
        super().__init__(split, len(order))
        self._questions, self._order = questions, order

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        number = self._order[index]
        question = self._questions[number]
        return Task(
            id=f"search_qa/{self.split}/{number}",
            prompt=(Message("user", question.text),),
            answer=list(question.answers),
            metadata={"data_source": question.source, "index": question.index},
        )


class SearchQa(TaskSet):
    """Questions with short answers, found by searching.

    Splits: ``train`` in the files' order, and ``eval``, in which data sources alternate, so that the first ``eval.size``
    tasks contain all of them. Files are read on the first access to a split.
    """

    def __init__(self, train: Files | None = None, eval: Files | None = None, corpus: str | Path | None = None) -> None:
        """Name the files.

        Args:
            train: JSONL or parquet files to train on.
            eval: JSONL or parquet files to evaluate on; without any there is no evaluation.
            corpus: a JSONL file of documents ``{"id", "contents"}`` for the search server; it is copied into
                the run's folder, so name a large one in ``tools.search.options.corpus`` instead.
        """
        self._files = {"train": file_paths(train), "eval": file_paths(eval)}
        self._corpus = Path(corpus).expanduser() if corpus is not None else None
        self._splits: dict[str, Questions] = {}

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of ``train`` or ``eval``.

        Raises:
            MissingError: a file does not exist.
            ConfigError: ``train`` has no files, a file holds no rows, or a row is invalid; the message states where.
        """
        if name not in self._files:
            raise unknown_name("split", name, self._files, "tasks.train_split, tasks.eval_split")
        if name not in self._splits:
            check_files({**self._files, "corpus": file_paths(self._corpus)})
            self._splits[name] = self._read(name)
        return self._splits[name]

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        """Return the documents of the option ``corpus``; the search server checks them."""
        return {"default": _documents(self._corpus)} if self._corpus is not None else {}

    def _read(self, name: str) -> Questions:
        key = f"tasks.options.{name}"
        if name == "train" and not self._files[name]:
            raise ConfigError(f"{key} is not set: give it a JSONL or parquet file of questions, or a list of them")
        questions = list(chain.from_iterable(_questions(path, key) for path in self._files[name]))
        order = range(len(questions)) if name == "train" else interleave([question.source for question in questions])
        return Questions(name, questions, order)


def interleave(sources: Sequence[str]) -> Sequence[int]:
    """Return all indices of ``sources``, taking one of each source in turn."""
    seen: dict[str, int] = {}
    rounds = []
    for source in sources:
        seen[source] = seen.get(source, -1) + 1
        rounds.append(seen[source])
    return sorted(range(len(sources)), key=rounds.__getitem__)


def _questions(path: Path, key: str) -> list[Question]:
    questions = [parse_row(row) for row in read_rows(path, key, COLUMNS)]
    if not questions:
        raise ConfigError(f"{key}={path}: the file holds no rows")
    return questions


def _documents(path: Path) -> Iterator[Mapping[str, str]]:
    for row in read_rows(path, "tasks.options.corpus"):
        for field in ("id", "contents"):
            if field not in row.values:
                raise ConfigError(f"{row.location} has no {field!r}; it has: {', '.join(row.columns) or 'nothing'}")
        yield {"id": str(row.values["id"]), "contents": row.values["contents"]}
