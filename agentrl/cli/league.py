"""``agentrl league``: ratings of a run's self-play over time, wins by seat, role asymmetry."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.core.extras import install_command, is_installed
from agentrl.obs.console import make_console
from agentrl.self_play.games import POLICY, WinTable
from agentrl.self_play.league import last_evaluation, read_league
from agentrl.self_play.league_plot import plot_league, shown_players
from agentrl.self_play.ratings import Ratings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run with self_play")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="the plot of ratings, scores by seat and role asymmetry (RUN_DIR/league.png)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the league after the last step, and plot ratings over steps."""
    rows, console = read_league(arguments.run_dir), make_console()
    last = rows[-1]
    ratings, results = Ratings.from_state(last["ratings"]), WinTable.from_state(last["results"])
    console.print(f"after step {last['step']}")
    console.print(_rating_table(ratings, rows))
    for seat in sorted({seat for _, _, seat in results.records}):
        console.print(_win_matrix(results, ratings, seat))
    _print_asymmetry(console, ratings, results)
    if (evaluation := last_evaluation(arguments.run_dir)) is not None:
        console.print(_evaluation_table(evaluation))
    if not is_installed("matplotlib"):
        console.print(f"no plot: {install_command('matplotlib')}", soft_wrap=True)
        return
    out = plot_league(rows, arguments.plot or arguments.run_dir / "league.png")
    console.print(f"plot        {out}", soft_wrap=True)


def _rating_table(ratings: Ratings, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("player", "rating", "±", "rating - 3 ±", "change in 10 steps")
    earlier = Ratings.from_state(rows[max(0, len(rows) - 11)]["ratings"])
    for player in ratings.ranking():
        rating = ratings.rating(player)
        change = f"{rating.mu - earlier.table[player].mu:+.2f}" if player in earlier.table else ""
        table.add_row(player, f"{rating.mu:.2f}", f"{rating.sigma:.2f}", f"{rating.low:.2f}", change)
    return table


def _win_matrix(results: WinTable, ratings: Ratings, seat: int) -> Table:
    """Return wins/draws/losses of each player (row) in a seat against each other one (column), for the most active ones."""
    players = shown_players(ratings, results)
    table = Table(f"seat {seat} against", *players, title=f"wins/draws/losses in seat {seat}")
    for player in players:
        records = [results.record(player, opponent, seat) for opponent in players]
        if any(record.games for record in records):
            cells = [
                f"{record.wins:g}/{record.draws:g}/{record.losses:g}" if record.games else "" for record in records
            ]
            table.add_row(player, *cells)
    return table


def _evaluation_table(row: Mapping[str, Any]) -> Table:
    """Return results of the policy in each set of an evaluation, by seat."""
    table = Table("set", "seat", "wins/draws/losses", "score", "reward", title=f"evaluation after step {row['step']}")
    for name, report in row["evaluation"].items():
        results = WinTable.from_state(report["results"])
        for (_, _, seat), record in sorted(results.records.items()):
            cells = (
                f"{record.wins:g}/{record.draws:g}/{record.losses:g}",
                f"{record.score:.2f}",
                f"{report['reward'][str(seat)]:.3f}",
            )
            table.add_row(name, str(seat), *cells)
    return table


def _print_asymmetry(console: Console, ratings: Ratings, results: WinTable) -> None:
    """Print how much more the policy scores in its best seat than in its worst one, against each opponent."""
    records = {
        opponent: (results.asymmetry(POLICY, opponent), results.record(POLICY, opponent))
        for opponent in [POLICY, *ratings.ranking()]
        if opponent != POLICY or results.record(POLICY, POLICY).games
    }
    table = Table("policy against", "score", "largest difference between seats", title="role asymmetry")
    for opponent, (difference, record) in records.items():
        if record.games:
            name = "itself" if opponent == POLICY else opponent
            table.add_row(name, f"{record.score:.2f}", f"{difference:.2f}")
    console.print(table)
