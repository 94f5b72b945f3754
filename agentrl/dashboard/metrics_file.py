"""``metrics.jsonl`` of a run that may still be written, or be damaged."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.reading import decode_step_row

Row = dict[str, float]
"""Metrics of a step or an evaluation, and its ``step``."""
POINTS = 1500
"""Most points of a curve that are sent; of more, evenly spaced ones and the last."""


class MetricsFile:
    """The rows of a ``metrics.jsonl``; `update` reads what was appended. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode = self._read_to = 0
        self._rows: list[Row] = []
        self.damaged = 0
        """Lines that are no rows of metrics."""

    def rows(self) -> list[Row]:
        """Return all rows in the order of their steps; a metric that is null or no number is left out."""
        with self._lock:
            self._update()
            return sorted(self._rows, key=lambda row: row["step"])

    def _update(self) -> None:
        try:
            with self._path.open("rb") as file:
                inode, size = _identity(file.fileno())
                if inode != self._inode or size < self._read_to:  # a resumed run has written it again
                    self._inode, self._read_to, self._rows, self.damaged = inode, 0, [], 0
                file.seek(self._read_to)
                data = file.read()
        except OSError:
            return
        lines = data[: data.rfind(b"\n") + 1]
        self._read_to += len(lines)
        for line in lines.split(b"\n")[:-1]:
            try:
                step, values = decode_step_row(line, str(self._path))
            except ConfigError:
                self.damaged += 1
                continue
            numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
            self._rows.append({**numbers, "step": step})


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size


def metric_keys(rows: Sequence[Row]) -> dict[str, float]:
    """Return the metrics of a run in alphabetical order, each with its last value."""
    last: dict[str, float] = {}
    for row in rows:
        last.update(row)
    last.pop("step", None)
    return dict(sorted(last.items()))


def curve(rows: Sequence[Row], key: str) -> dict[str, list[float]]:
    """Return ``{"steps": […], "values": […]}`` of a metric, at most about `POINTS` of them."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    stride = -(-len(points) // POINTS) or 1
    drawn = [point for number, point in enumerate(reversed(points)) if number % stride == 0][::-1]
    return {"steps": [step for step, _ in drawn], "values": [value for _, value in drawn]}
