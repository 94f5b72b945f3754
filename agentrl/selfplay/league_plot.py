"""Plot of ratings over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.selfplay.games import POLICY


def plot_ratings(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Plot the rating of each player with its standard deviation over steps, to the PNG ``out``; return its path.

    Args:
        rows: of `read_league`.
        out: the file.

    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    players = sorted({player for row in rows for player in row["ratings"]}, key=lambda name: (name != POLICY, name))
    for player in players:
        points = [(row["step"], *row["ratings"][player]) for row in rows if player in row["ratings"]]
        steps, means, spreads = zip(*points, strict=True)
        lows = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        highs = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        [line] = axes.plot(steps, means, label=player, linewidth=2.0 if player == POLICY else 1.0)
        axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("rating")
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)
    figure.savefig(out)
    return out
