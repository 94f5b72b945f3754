"""Plot of a league: ratings over the steps of a run, the win matrix of each seat, and role asymmetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.self_play.games import POLICY, Record, WinTable
from agentrl.self_play.ratings import Ratings

MOST_PLAYERS = 12
"""Most players in a legend and in a win matrix: the policy, and those with the most games."""
MOST_SEATS = 3
"""Most seats with a win matrix."""
WINDOW = 10
"""Steps over which the score of a seat is averaged."""


def plot_league(rows: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Plot the league of a run to the PNG ``out``; return its path.

    Args:
        rows: of `read_league`.
        out: the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results, ratings = WinTable.from_state(rows[-1]["results"]), Ratings.from_state(rows[-1]["ratings"])
    players = shown_players(ratings, results)
    seats = sorted({seat for _, _, seat in results.records})
    figure = Figure(figsize=(4.6 * (len(seats[:MOST_SEATS]) + 1), 8.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(seats[:MOST_SEATS]) + 1)
    _plot_ratings(figure.add_subplot(grid[0, :]), rows, players)
    for column, seat in enumerate(seats[:MOST_SEATS]):
        _plot_matrix(figure.add_subplot(grid[1, column]), results, players, seat)
    _plot_asymmetry(figure.add_subplot(grid[1, -1]), rows, seats)
    figure.savefig(out)
    return out


def shown_players(ratings: Ratings, results: WinTable) -> list[str]:
    """Return the policy and the players with the most games, at most `MOST_PLAYERS`: the best rating first, unrated ones last."""
    games: dict[str, float] = {}
    for (player, _, _), record in results.records.items():
        games[player] = games.get(player, 0.0) + record.games
    ranking = [*ratings.ranking(), *sorted(set(games) - set(ratings.table))]
    chosen = sorted(ranking, key=lambda player: (player != POLICY, -games.get(player, 0.0), player))[:MOST_PLAYERS]
    return [player for player in ranking if player in chosen]


def _plot_ratings(axes: Any, rows: Sequence[Mapping[str, Any]], labelled: Sequence[str]) -> None:
    """Plot the rating of each player with its standard deviation over steps."""
    players = sorted({player for row in rows for player in row["ratings"]}, key=lambda name: (name != POLICY, name))
    for player in players:
        points = [(row["step"], *row["ratings"][player]) for row in rows if player in row["ratings"]]
        steps, means, spreads = zip(*points, strict=True)
        lows = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        highs = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        name, width = player if player in labelled else None, 2.0 if player == POLICY else 1.0
        [line] = axes.plot(steps, means, label=name, linewidth=width)
        axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="rating ± standard deviation")
    axes.grid(alpha=0.3)
    if players:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _plot_matrix(axes: Any, results: WinTable, players: Sequence[str], seat: int) -> None:
    """Plot the score of each player (row) in a seat against each other one (column)."""
    records = [[results.record(player, opponent, seat) for opponent in players] for player in players]
    axes.imshow(
        [[record.score if record.games else np.nan for record in row] for row in records], cmap="RdYlGn", vmin=0, vmax=1
    )
    for y, row in enumerate(records):
        for x, record in enumerate(row):
            if record.games:
                axes.text(x, y, f"{record.score:.2f}", ha="center", va="center", fontsize=7)
    axes.set_title(f"score in seat {seat} (row) against (column)", fontsize=9)
    axes.set_xticks(range(len(players)), players, rotation=90, fontsize=7)
    axes.set_yticks(range(len(players)), players, fontsize=7)


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
    axes.set_title(f"policy's score {'in mirror play' if mirror else 'against all'}, last {WINDOW} steps", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _policy_record(table: WinTable, seat: int, *, mirror: bool) -> Record:
    total = Record()
    for (player, opponent, record_seat), record in table.records.items():
        if (player, record_seat) == (POLICY, seat) and (opponent == POLICY or not mirror):
            total = total.plus(record)
    return total
