"""Metrics of a run: one JSON object per step in ``metrics.jsonl``, which is the record; trackers; a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import decode_step_row, flatten_message, reading
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
        copy_metrics(self.path, self.path, until=-1 if resume_after is None else resume_after)

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
    rows = [row for _, row in _rows(path)]
    if nulls:
        return rows
    return [{key: value for key, value in row.items() if not math.isnan(value)} for row in rows]


def copy_metrics(path: Path, out: Path, *, until: int) -> None:
    """Write the lines of a ``metrics.jsonl`` up to step ``until`` to ``out``, which may be the same file, as they are.

    Raises:
        ConfigError: the file is damaged; the message has the line.
    """
    lines = [] if until < 0 else [line + b"\n" for line, row in _rows(path) if row["step"] <= until]
    with write_atomically(out) as partial:
        partial.write_bytes(b"".join(lines))


def _rows(path: Path) -> list[tuple[bytes, dict[str, float]]]:
    """Return the lines with their rows; null is NaN in them."""
    if not path.is_file():
        return []
    with reading(path, "log of metrics"):
        lines = path.read_bytes().split(b"\n")
    return [(line, _decode(line, f"{path}, line {number}")) for number, line in enumerate(lines[:-1], 1)]


def _decode(line: bytes, location: str) -> dict[str, float]:
    step, values = decode_step_row(line, location)
    row: dict[str, float] = {}
    for key, value in values.items():
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            shown = flatten_message(repr(value))
            raise ConfigError(f"{location} is damaged: the metric {key!r} is {shown}, and neither a number nor null")
        row[key] = math.nan if value is None else float(value)
    return row | {"step": step}


def plot_curve(metrics: Path, out: Path, keys: Sequence[str]) -> Path | None:
    """Plot the ``keys`` of a ``metrics.jsonl`` over steps to the PNG ``out``; return None if no step has any of them.

    Keys that start with ``eval/`` are drawn as points joined by a line, others as a line. Identical series are drawn once,
    with all of their names.

    Raises:
        OSError: such as of a full disk; it names the file.
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
    with write_atomically(out) as partial:
        figure.savefig(partial, format="png")
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
