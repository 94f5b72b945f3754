"""``agentrl bench gateway``."""

from __future__ import annotations

import argparse
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.cli.options import add_plain_config_arguments, resolve_plain_config
from benchmarks.commands.output import open_table, split_numbers

if TYPE_CHECKING:
    from benchmarks.gateway import GatewayTimes

HELP = "CPU a turn of agent programs' sessions, over that of the runner's own turns, with a scripted engine"
_HEADS = ("sessions", "client", "turns", "CPU ms/turn", "of the runner's", "first byte ms, median", "p95")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sessions", metavar="NUMBERS", default="100,1000", help="concurrent sessions of the passes, comma-separated"
    )
    parser.add_argument("--episodes", type=int, default=1000, help="least episodes of a pass")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--new-tokens", type=int, default=256, help="sampled tokens of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the first prompt, about")
    parser.add_argument("--observation-tokens", type=int, default=128, help="tokens of an observation, about")
    parser.add_argument("--repeats", type=int, default=1, help="passes of each")
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.efficiency import EfficiencyBench
    from benchmarks.gateway import PATHS, measure_gateway

    bench = EfficiencyBench(
        size="tiny",
        episodes=arguments.episodes,
        concurrency=0,
        turns=arguments.turns,
        new_tokens=arguments.new_tokens,
        prompt_tokens=arguments.prompt_tokens,
        observation_tokens=arguments.observation_tokens,
        repeats=arguments.repeats,
    )
    sessions = split_numbers(arguments.sessions, "--sessions")
    passes: list[GatewayTimes] = []
    with open_table(console, "starting", *_HEADS) as (table, progress):
        for times in measure_gateway(resolve_plain_config(arguments), bench, sessions, PATHS, progress):
            passes.append(times)
            table.add_row(*_row(times, passes))
    console.print(
        f"CPU: of the runner's process, in which the gateway is; {bench.turns} turns of {bench.new_tokens} tokens an episode. Of "
        "the runner's: CPU a turn over that of the runner's own turns at the same number of sessions (limit 1.5), medians of the "
        "passes so far. First byte: from the engine's reply to the first byte of the turn at the client (limit 20 ms)"
    )


def _row(times: GatewayTimes, passes: list[GatewayTimes]) -> list[str]:
    def cpu_ms(path: str) -> float:
        return median(
            other.cpu_ms_per_turn for other in passes if (other.sessions, other.path) == (times.sessions, path)
        )

    delays = times.first_byte_ms
    return [
        f"{times.sessions:,}",
        times.path,
        f"{times.turns:,}",
        f"{times.cpu_ms_per_turn:.3f}",
        f"{cpu_ms(times.path) / cpu_ms('runner'):.2f}",
        f"{median(delays):.1f}" if delays else "",
        f"{delays[int(0.95 * len(delays))]:.1f}" if delays else "",
    ]
