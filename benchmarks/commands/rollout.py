"""``agentrl bench rollout``."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from agentrl.cli.options import add_config_arguments, resolve_config
from benchmarks.commands.output import open_table

HELP = "episodes, tokens and CPU a turn: real engine, and replayed in the process"
_HEADS = ("sampler", "episodes/s", "sampled tokens/s", "turns", "runner CPU ms/turn", "of that event loop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--episodes", type=int, default=256, help="episodes to run")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.episode_runner import RolloutTimes
    from benchmarks.rollout import measure_rollout

    config = resolve_config(arguments)
    with open_table(console, "running episodes", *_HEADS) as (table, _):
        times_by_sampler = {}

        def show(sampler: str, times: RolloutTimes) -> None:
            times_by_sampler[sampler] = times
            rates = (f"{times.episodes_per_s:.1f}", f"{times.tokens_per_s:,.0f}")
            cpu = (f"{times.cpu_ms_per_turn:.3f}", f"{times.loop_ms_per_turn:.3f}")
            table.add_row(sampler, *rates, str(times.turns), *cpu)

        asyncio.run(measure_rollout(config, arguments.episodes, show))
    runner = times_by_sampler["replayed"].cpu_ms_per_turn
    client = times_by_sampler["engine"].cpu_ms_per_turn - runner
    console.print(f"runner with tools {runner:.3f} ms a turn (target under 1); HTTP client {client:.3f} ms in addition")
