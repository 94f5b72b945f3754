"""``agentrl bench efficiency``, with a model or, by ``--scripted``, without one."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.cli.options import add_plain_config_arguments, resolve_plain_config
from agentrl.config.schema import Config
from benchmarks.commands.output import open_table, split_numbers

if TYPE_CHECKING:
    from benchmarks.efficiency import EfficiencyBench

HELP = "tokens/s of both loops over those of a bare client that requests the same of the same engines"
_SCRIPTED_HEADS = (
    "episodes", "sampler", "turns", "CPU ms/turn", "of that event loop", "KiB/episode", "stall ms", "threads",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--size", default="0.6b", help="of the random model: tiny, 0.6b, 4b or 8b")
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a pass")
    parser.add_argument("--concurrency", type=int, help="episodes at the same time; all, unless it is set")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--new-tokens", type=int, default=256, help="sampled tokens of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the first prompt, about")
    parser.add_argument("--observation-tokens", type=int, default=128, help="tokens of an observation, about")
    parser.add_argument("--repeats", type=int, default=2, help="passes of each")
    parser.add_argument(
        "--scripted",
        metavar="NUMBERS",
        help="without a model: cost of the runner at these numbers of concurrent episodes, comma-separated",
    )
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.efficiency import EfficiencyBench

    config = resolve_plain_config(arguments)
    bench = EfficiencyBench(
        size=arguments.size,
        episodes=arguments.episodes,
        concurrency=arguments.concurrency or arguments.episodes,
        turns=arguments.turns,
        new_tokens=arguments.new_tokens,
        prompt_tokens=arguments.prompt_tokens,
        observation_tokens=arguments.observation_tokens,
        repeats=arguments.repeats,
        runners=config.rollout.runners,
    )
    if arguments.scripted is None:
        asyncio.run(_run_engines(config, bench, console))
    else:
        _run_scripted(config, bench, split_numbers(arguments.scripted, "--scripted"), console)


async def _run_engines(config: Config, bench: EfficiencyBench, console: Console) -> None:
    from benchmarks.efficiency import Pass, efficiency, measure_efficiency

    passes: list[Pass] = []
    heads = ("pass", "who", "seconds", "sampled tokens/s", "driver CPU ms/turn", "runners CPU ms/turn")
    with open_table(console, "making a model", *heads) as (table, progress):
        async for times in measure_efficiency(config, bench, progress):
            passes.append(times)
            seconds, rate = f"{times.seconds:.2f}", f"{times.tokens_per_s:,.0f}"
            cpu = (f"{times.cpu_ms_per_turn:.2f}", f"{times.runner_ms_per_turn:.2f}")
            table.add_row(str(len(passes)), times.who, seconds, rate, *cpu)
    console.print(
        f"efficiency {efficiency(passes, 'synchronous'):.3f} synchronous, {efficiency(passes, 'asynchronous'):.3f} asynchronous: "
        "the loop's sampled tokens/s over the bare client's, medians (targets 0.99, and at most 1 ms of CPU a turn). "
        f"{bench.episodes} episodes of {bench.turns} turns of {bench.new_tokens} tokens, {bench.concurrency} at the same "
        f"time, random {bench.size} model, {config.sampler.backend}; the cache flushed before each pass"
    )


def _run_scripted(config: Config, bench: EfficiencyBench, concurrencies: list[int], console: Console) -> None:
    from benchmarks.concurrency import measure_concurrency

    with open_table(console, "starting", *_SCRIPTED_HEADS) as (table, progress):
        for load in measure_concurrency(config, bench, concurrencies, progress):
            sampler = "HTTP" if load.over_http else "in the process"
            cpu = (f"{load.cpu_ms_per_turn:.3f}", f"{load.loop_ms_per_turn:.3f}")
            process = (f"{load.kib_per_episode:.0f}", f"{load.stall_ms:.0f}", str(load.threads))
            table.add_row(f"{load.concurrency:,}", sampler, f"{load.turns:,}", *cpu, *process)
    console.print(
        f"episodes: at the same time, {bench.turns} turns of {bench.new_tokens} tokens each; HTTP less in the process is the "
        "HTTP client. KiB: growth of the process's memory, finished rollouts included. Stall: longest delay of a callback of "
        "the event loop"
    )
