"""``agentrl bench view``."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.commands.output import open_table

HELP = "seconds to make a page of a large run, and to open it in a browser"
_HEADS = ("rollouts", "tokens", "page MiB", "build s", "open ms", "open s, from outside")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of the synthetic run")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.viewer import measure_view

    rollouts, tokens = arguments.rollouts, arguments.rollouts * arguments.tokens
    with open_table(console, "building and opening a page", *_HEADS) as (table, _):
        times = measure_view(rollouts, arguments.tokens)
        seconds = (f"{times.build_s:.1f}", f"{times.ready_ms:.0f}", f"{times.wall_s:.2f}")
        table.add_row(f"{rollouts:,}", f"{tokens:,}", f"{times.size / 2**20:.1f}", *seconds)
    console.print("open: until the first rollout with its tokens is on screen (target under 3 s)")
