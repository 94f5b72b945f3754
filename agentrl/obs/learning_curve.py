"""Plot of a run's metrics over its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.obs.metrics import read_metrics


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
