"""A run's figures: one JSON object a step in ``metrics.jsonl``, and TensorBoard beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class MetricsLog:
    """Appends a line a step and flushes it, so that a killed run has every finished step.

    A resumed run drops the lines after its checkpoint's step: those steps are done again.
    """

    def __init__(self, folder: Path, *, tensorboard: bool, resume_after: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        kept = [] if resume_after is None else [row for row in read_metrics(self.path) if row["step"] <= resume_after]
        _rewrite(self.path, kept)
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_after is None else resume_after + 1
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge, flush_secs=5)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of one step."""
        self._file.write(json.dumps({"step": step, **{key: round(value, 8) for key, value in figures.items()}}) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in figures.items():
                self._board.add_scalar(key, value, step)

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsLog:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return all rows of a ``metrics.jsonl``; a last line that a kill cut short is left out."""
    if not path.is_file():
        return []
    rows: list[dict[str, float]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise
    return rows


def _rewrite(path: Path, rows: Iterable[Mapping[str, float]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(partial, path)
