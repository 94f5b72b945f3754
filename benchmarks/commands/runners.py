"""``agentrl bench runners``."""

from __future__ import annotations

import argparse

from rich.console import Console

from agentrl.cli.options import add_plain_config_arguments, resolve_plain_config
from benchmarks.commands.output import open_table, split_numbers

HELP = "turns/s, CPU a turn, bytes and stalls by the number of runner processes, with scripted engines"
_HEADS = (
    "runners", "turns/s", "driver CPU ms/turn", "runner CPU ms/turn", "stall ms", "driver GiB", "runners GiB",
    "journal KB/episode", "rollouts KB/episode",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--runners", metavar="NUMBERS", default="0,1,2", help="processes of the passes, comma-separated"
    )
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a pass for each runner")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes of a runner at the same time")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--new-tokens", type=int, default=256, help="sampled tokens of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the first prompt, about")
    parser.add_argument("--observation-tokens", type=int, default=128, help="tokens of an observation, about")
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.efficiency import EfficiencyBench
    from benchmarks.runners import measure_runners

    bench = EfficiencyBench(
        size="tiny",
        episodes=arguments.episodes,
        concurrency=arguments.concurrency,
        turns=arguments.turns,
        new_tokens=arguments.new_tokens,
        prompt_tokens=arguments.prompt_tokens,
        observation_tokens=arguments.observation_tokens,
        repeats=1,
    )
    counts = split_numbers(arguments.runners, "--runners")
    with open_table(console, "starting", *_HEADS) as (table, progress):
        for times in measure_runners(resolve_plain_config(arguments), bench, counts, progress):
            cells = (times.turns / times.seconds, times.driver_ms, times.runner_ms, times.stall_ms)
            sizes = (times.journal_bytes / times.episodes / 1e3, times.rollout_bytes / times.episodes / 1e3)
            rate, driver, runner, stall = cells
            texts = (
                f"{rate:.0f}",
                f"{driver:.3f}",
                f"{runner:.3f}",
                f"{stall:.0f}",
                f"{times.driver_bytes / 2**30:.2f}",
                f"{times.runners_bytes / 2**30:.2f}",
                *(f"{size:.1f}" for size in sizes),
            )
            table.add_row(str(times.runners), *texts)
    console.print(
        f"runners: processes, 0 is the driver alone; {bench.episodes} episodes for each, {bench.concurrency} at a time, of "
        f"{bench.turns} turns of {bench.new_tokens} tokens. Stall: longest delay of a callback of the driver's event loop"
    )
