"""Metrics of a run: one JSON object per step in ``metrics.jsonl``, which is the record; trackers; a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import orjson

from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.reading import reading
from agentrl.core.types import Rollout
from agentrl.obs.trackers import Tracker, sample_table


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Appends one line per step, so that a killed run has the metrics of every finished step.

    Args:
        folder: folder of the run.
        trackers: receive the same metrics; closed with the log.
        table_rows: rollouts of each step in the trackers' sample tables.
        resume_after: step of the checkpoint from which a run is resumed. Lines of later steps are removed, because these
            steps are run again.
    """

    def __init__(
        self, folder: Path, *, trackers: Sequence[Tracker] = (), table_rows: int = 0, resume_after: int | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._trackers = trackers
        self._table_rows = table_rows
        rows = [] if resume_after is None else [row for row in read_metrics(self.path) if row["step"] <= resume_after]
        _rewrite(self.path, rows)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step, with 12 digits; what is no number, such as the loss of a step that broke, as null."""
        row = {key: float(f"{value:.12g}") if math.isfinite(value) else None for key, value in metrics.items()}
        append(self.path, (json.dumps({"step": step, **row}) + "\n").encode())
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def samples(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write some of a step's rollouts to the trackers' sample tables."""
        if self._table_rows and self._trackers and rollouts:
            table = sample_table(rollouts, self._table_rows)
            for tracker in self._trackers:
                tracker.samples(step, table)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()

    def __exit__(self, *exception: object) -> None:
        """Close the trackers."""
        self.close()


def read_metrics(path: Path, *, nulls: bool = False) -> list[dict[str, float]]:
    """Return all rows of a ``metrics.jsonl``; an incomplete last line, from a killed run, is skipped.

    Args:
        path: the file.
        nulls: whether null is NaN in the rows; else it is skipped.

    Raises:
        ConfigError: the file is damaged; the message has the line.
    """
    if not path.is_file():
        return []
    with reading(path, "log of metrics"):
        lines = path.read_bytes().split(b"\n")
    return [_row(line, f"{path}, line {number}", nulls=nulls) for number, line in enumerate(lines[:-1], 1)]


def _row(line: bytes, location: str, *, nulls: bool) -> dict[str, float]:
    with reading(location, "row of metrics"):
        values = {str(key): value for key, value in orjson.loads(line).items() if nulls or value is not None}
        row = {key: math.nan if value is None else float(value) for key, value in values.items()}
        return row | {"step": int(row["step"])}


def _rewrite(path: Path, rows: Iterable[Mapping[str, float]]) -> None:
    with write_atomically(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def plot_curve(metrics: Path, out: Path, keys: Sequence[str]) -> Path | None:
    """Plot the ``keys`` of a ``metrics.jsonl`` over steps to the PNG ``out``; return None if no step has any of them.

    Keys that start with ``eval/`` are drawn as points joined by a line, others as a line. Identical series are drawn once,
    with all of their names.
    """
    rows = read_metrics(metrics)
    series = {key: [(row["step"], row[key]) for row in rows if key in row] for key in keys}
    series = {key: points for key, points in series.items() if points}
    if not series:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for names, points in merge_equal_series(series):
        style = {"marker": "o", "linewidth": 2.0} if names[0].startswith("eval/") else {"linewidth": 1.0, "alpha": 0.7}
        axes.plot([step for step, _ in points], [value for _, value in points], label=" = ".join(names), **style)
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.savefig(out)
    return out


Points = list[tuple[float, float]]


def merge_equal_series(series: Mapping[str, Points]) -> list[tuple[list[str], Points]]:
    """Return each distinct series once, with all of its names."""
    series_by_names: list[tuple[list[str], Points]] = []
    for name, points in series.items():
        same = next((names for names, drawn_points in series_by_names if drawn_points == points), None)
        if same is None:
            series_by_names.append(([name], points))
        else:
            same.append(name)
    return series_by_names
