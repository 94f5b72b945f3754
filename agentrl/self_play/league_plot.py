"""Plot of a league: ratings over the steps of a run, the policy's score by seat and opponent, and role asymmetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.self_play.games import POLICY, Record, WinTable
from agentrl.self_play.ratings import Ratings

MOST_PLAYERS = 12
"""Most players in a table of scores: the policy, and those with the most games."""
WINDOW = 10
"""Steps over which the score of a seat is averaged."""


def plot_league(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Plot the league of a run to the PNG ``out``; return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results, ratings = WinTable.from_state(rows[-1]["results"]), Ratings.from_state(rows[-1]["ratings"])
    figure = Figure(figsize=(12, 9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2), height_ratios=(3, 2))
    _plot_ratings(figure.add_subplot(grid[0, :]), rows)
    _plot_scores(figure.add_subplot(grid[1, 0]), results, shown_players(ratings, results))
    _plot_asymmetry(figure.add_subplot(grid[1, 1]), rows, _seats(results))
    figure.savefig(out)
    return out


def _seats(results: WinTable) -> list[int]:
    return sorted({seat for _, _, seat in results.records})


def shown_players(ratings: Ratings, results: WinTable) -> list[str]:
    """Return the policy and the players with the most games, at most `MOST_PLAYERS`: the best rating first, unrated ones last."""
    games: dict[str, float] = {}
    for (player, _, _), record in results.records.items():
        games[player] = games.get(player, 0.0) + record.games
    ranking = [*ratings.ranking(), *sorted(set(games) - set(ratings.table))]
    chosen = sorted(ranking, key=lambda player: (player != POLICY, -games.get(player, 0.0), player))[:MOST_PLAYERS]
    return [player for player in ranking if player in chosen]


def _snapshot_step(player: str) -> int | None:
    """Return the step of a snapshot; None for other players."""
    step = player.removeprefix("step_")
    return int(step) if step != player and step.isdecimal() else None


def _plot_ratings(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot ratings over steps: policy and scripted players with their standard deviation, snapshots by colour of their step."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    players = sorted({player for row in rows for player in row["ratings"]}, key=lambda name: (name == POLICY, name))
    steps_of_snapshots = [step for player in players if (step := _snapshot_step(player)) is not None]
    scale = Normalize(min(steps_of_snapshots, default=0), max(steps_of_snapshots, default=1))
    others = [player for player in players if player != POLICY and _snapshot_step(player) is None]
    for player in players:
        points = [(row["step"], *row["ratings"][player]) for row in rows if player in row["ratings"]]
        steps, means, spreads = (np.array(values) for values in zip(*points, strict=True))
        if (snapshot_step := _snapshot_step(player)) is not None:
            axes.plot(steps, means, color=colormaps["viridis"](scale(snapshot_step)), linewidth=0.8, zorder=1)
            continue
        color = "black" if player == POLICY else f"C{others.index(player) + 1}"
        axes.plot(steps, means, label=player, color=color, linewidth=2.4 if player == POLICY else 1.6, zorder=3)
        axes.fill_between(steps, means - spreads, means + spreads, color=color, alpha=0.12, linewidth=0, zorder=2)
    if steps_of_snapshots:
        axes.figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label="snapshot of step", pad=0.01)
    axes.set(xlabel="step", ylabel="rating ± standard deviation")
    axes.grid(alpha=0.3)
    if players:
        axes.legend(loc="upper left", fontsize=8)


def _plot_scores(axes: Any, results: WinTable, players: Sequence[str]) -> None:
    """Plot the policy's score in each seat (row) against each player (column), with the number of games."""
    seats = _seats(results)
    records = [[results.record(POLICY, opponent, seat) for opponent in players] for seat in seats]
    scores = [[record.score if record.games else np.nan for record in row] for row in records]
    axes.imshow(np.array(scores, ndmin=2), cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(records):
        for x, record in enumerate(row):
            if record.games:
                axes.text(x, y, f"{record.score:.2f}\n{record.games:.0f}", ha="center", va="center", fontsize=8)
    labels = [player if (step := _snapshot_step(player)) is None else f"step {step}" for player in players]
    axes.set_title("policy's score and games, by seat, against", fontsize=10)
    axes.set_xticks(range(len(players)), labels, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(seats)), [f"seat {seat}" for seat in seats], fontsize=8)


def _plot_asymmetry(axes: Any, rows: Sequence[Mapping[str, Any]], seats: Sequence[int]) -> None:
    """Plot the policy's score in each seat over steps: of mirror play, or against all if there is none."""
    tables = [WinTable.from_state(row["results"]) for row in rows]
    mirror = tables[-1].record(POLICY, POLICY).games > 0
    for seat in seats:
        sums = [_policy_record(table, seat, mirror=mirror) for table in tables]
        recent = [
            total.minus(earlier_total) for earlier_total, total in zip([Record()] * WINDOW + sums, sums, strict=False)
        ]
        points = [(row["step"], record.score) for row, record in zip(rows, recent, strict=True) if record.games]
        axes.plot(*zip(*points, strict=True), label=f"seat {seat}")
    axes.set(xlabel="step", ylim=(-0.05, 1.05))
    axes.set_title(f"policy's score {'in mirror play' if mirror else 'against all'}, last {WINDOW} steps", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _policy_record(table: WinTable, seat: int, *, mirror: bool) -> Record:
    total = Record()
    for (player, opponent, record_seat), record in table.records.items():
        if (player, record_seat) == (POLICY, seat) and (opponent == POLICY or not mirror):
            total = total.plus(record)
    return total
