"""Worker processes that read and convert rows; their results come in order."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from agentrl.core.child_process import init_worker_process
from agentrl.core.errors import AgentrlError, DataError
from agentrl.core.task import Task
from agentrl.data.conversion import RowConversion
from agentrl.data.row_table import RowTable
from agentrl.data.rows import Row, place_of
from agentrl.obs.waiting import waiting

PIECE = 16
"""Rows that a worker process gets at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that follow each other in the order of a stream."""

    epoch: int
    """How often all rows came before."""
    begin: dict[str, Any]
    """State of the stream before the piece; ``position`` counts rows."""
    rows: Sequence[int | Row]
    """Numbers of rows in the table, or rows."""


@dataclass(frozen=True, slots=True)
class ConvertedRow:
    """The result of a row."""

    number: int
    """See `Row.number`."""
    epoch: int
    """See `Piece.epoch`."""
    state: dict[str, Any]
    """State of the stream after the row."""
    result: Task | AgentrlError | None
    """None if the row is left out."""


class RowWorker:
    """Reads and converts rows. Each worker process has a copy.

    Args:
        table: of the rows; None if pieces have the rows themselves.
        convert: from row to task.

    """

    def __init__(self, table: RowTable | None, convert: RowConversion) -> None:
        self.table = table
        self.convert = convert
        self.at: Any = None
        """Shared memory of the worker processes: for each its process id, and the number of its row; 0 is none."""

    def __getitem__(self, piece: Piece) -> list[ConvertedRow]:
        """Return the results of a piece; it is an item of this data set to `torch.utils.data.DataLoader`."""
        found = []
        for count, place in enumerate(piece.rows, 1):
            number, result = self._convert(place)
            state = {**piece.begin, "position": piece.begin["position"] + count}
            found.append(ConvertedRow(number, piece.epoch, state, result))
        return found

    def _convert(self, place: int | Row) -> tuple[int, Task | AgentrlError | None]:
        number = place + 1 if isinstance(place, int) else place.number
        try:
            row = self._read(place)
            number = row.number
            self._note(number)
            return number, self.convert(row)
        except AgentrlError as error:
            return number, error
        finally:
            self._note(0)

    def _read(self, place: int | Row) -> Row:
        if isinstance(place, Row):
            return place
        assert self.table is not None, "pieces have the rows, or there is a table"
        return self.table[place]

    def _note(self, number: int) -> None:
        if self.at is not None:
            from torch.utils.data import get_worker_info

            info = get_worker_info()
            assert info is not None, "only worker processes have this memory"
            self.at[2 * info.id], self.at[2 * info.id + 1] = os.getpid(), number


class OrderedRows:
    """Iterator over the results of pieces, in order, whatever the number of worker processes.

    Args:
        path: of the rows, for messages.
        pieces: read ahead of the results.
        worker: reads and converts.
        workers: number of processes; 0 is this one.

    """

    def __init__(self, path: Any, pieces: Iterable[Piece], worker: RowWorker, workers: int) -> None:
        self._path = path
        self._workers = workers
        self._worker = worker
        self._batches: Iterator[list[ConvertedRow]] = (
            self._from_workers(pieces) if workers else map(worker.__getitem__, pieces)
        )
        self._results: Iterator[ConvertedRow] = iter(())
        self._processes: list[BaseProcess] = []

    def __iter__(self) -> Iterator[ConvertedRow]:
        """Return the iterator itself."""
        return self

    def __next__(self) -> ConvertedRow:
        """Return the next result.

        Raises:
            DataError: a worker process died.

        """
        found = next(self._results, None)
        while found is None:
            with waiting("data", str(self._path)):
                self._results = iter(next(self._batches))
            found = next(self._results, None)
        return found

    def _from_workers(self, pieces: Iterable[Piece]) -> Iterator[list[ConvertedRow]]:
        import torch
        from torch.utils.data import DataLoader

        # This process has threads: a forked one could hang in a lock that a thread held.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload([__name__, "torch"])  # imported once, not by each worker
        self._worker.at = processes.RawArray("q", 2 * self._workers)
        others = multiprocessing.active_children()
        batches = iter(
            DataLoader(
                self._worker,  # type: ignore[arg-type]
                sampler=pieces,
                batch_size=None,
                num_workers=self._workers,
                multiprocessing_context=processes,
                worker_init_fn=init_worker_process,
                generator=torch.Generator(),  # the default one is the run's
            )
        )
        self._processes = [process for process in multiprocessing.active_children() if process not in others]
        atexit.register(self.close)  # workers ignore the signal with which Python would end them, and it would wait
        while True:
            try:
                found = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if "exited unexpectedly" not in str(error):
                    raise
                raise self._death() from error
            yield found

    def _death(self) -> DataError:
        """Return the error for a worker process that died."""
        dead = {process.pid for process in self._processes if not process.is_alive()}
        slots = [self._worker.at[2 * index : 2 * index + 2] for index in range(self._workers)]
        rows = [place_of(self._path, number) for pid, number in slots if pid in dead and number]
        at = f" at {' and '.join(rows)}" if rows else " between two rows"
        return DataError(
            f"data.path={self._path}: a worker process (data.workers={self._workers}) was killed or crashed{at}. "
            "If memory is short, lower data.workers"
        )

    def close(self) -> None:
        """Kill the worker processes. They hold nothing that is needed."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._batches = iter(())
