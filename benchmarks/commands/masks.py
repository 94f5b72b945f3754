"""``agentrl bench masks``."""

from __future__ import annotations

import argparse

from rich.console import Console

from agentrl.cli.options import add_config_arguments, resolve_config
from benchmarks.commands.output import open_table

HELP = "tokens/s from turns to checked batches, against retokenizing every turn"
_RATE_HEADS = ("episodes", "tokens", "rows tokens/s", "packing tokens/s", "check tokens/s", "all tokens/s")
_LONG_HEADS = ("turns", "tokens", "exact s", "tokens/s", "µs a token", "retokenised s", "times cheaper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.rollout import measure_long, measure_masks

    config = resolve_config(arguments)
    with open_table(console, "building rows", *_RATE_HEADS) as (table, _):
        for name, times in measure_masks(config):
            rates = (times.build_tokens_per_s, times.pack_tokens_per_s, times.check_tokens_per_s, times.tokens_per_s)
            table.add_row(name, f"{times.tokens:,}", *(f"{rate:,.0f}" for rate in rates))
    with open_table(console, "holding long conversations", *_LONG_HEADS) as (table, _):
        for episode in measure_long(config):
            speed = (f"{episode.tokens_per_s:,.0f}", f"{1e6 / episode.tokens_per_s:.2f}")
            exact = (str(episode.turns), f"{episode.tokens:,}", f"{episode.seconds:.3f}", *speed)
            table.add_row(*exact, f"{episode.retokenise_s:.2f}", f"{episode.ratio:.1f}")
    console.print(
        "exact: render, bridge, parse, graph, rows, pack, check; retokenised: the chat template on the whole conversation "
        "every turn. Tokenising the observations counts on both sides (target 20 times cheaper, µs a token level)"
    )
