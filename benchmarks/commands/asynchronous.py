"""``agentrl bench async``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.core.errors import ConfigError
from benchmarks.commands.output import open_table, split_numbers

if TYPE_CHECKING:
    from benchmarks.asynchronous import Mode

HELP = "asynchronous against synchronous training in virtual time, each with its best split of the GPUs"
_HEADS = (
    "staleness", "GPUs", "seconds", "speed-up", "age mean", "p95", "max", "by length", "engines idle", "learner idle",
    "dropped",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rollouts", type=Path, metavar="RUN_DIR", help="draw episodes from this run's rollout files")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of engines and learner together")
    parser.add_argument("--staleness", default="1,2,4,8", help="values of async.max_staleness, comma-separated")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=16, help="training steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="groups of a step")
    parser.add_argument("--samples", type=int, default=8, help="episodes of a group")
    parser.add_argument("--token-scale", type=float, default=16.0, help="tokens for each recorded one")
    parser.add_argument(
        "--tail", type=float, default=0.0, help="a longer tail: sigma of a log-normal factor of sampled tokens"
    )
    parser.add_argument("--longest", type=float, default=8.0, help="upper limit of that factor")
    parser.add_argument(
        "--streaming", action="store_true", help="async.streaming: the learner computes groups as they finish"
    )
    parser.add_argument(
        "--pause", choices=("in_place", "abort"), default="in_place", help="weights.pause; abort drops the caches"
    )


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Simulate and print."""
    from benchmarks.asynchronous import AsyncBench, measure_async
    from benchmarks.scripted_engines import EngineRates
    from benchmarks.workload import SHIPPED, Tail, read_groups, recorded_groups

    if arguments.gpus < 2:
        raise ConfigError(f"--gpus {arguments.gpus}: engines and learner need one each")
    bench = AsyncBench(
        read_groups(SHIPPED) if arguments.rollouts is None else recorded_groups(arguments.rollouts),
        gpus=arguments.gpus,
        steps=arguments.steps,
        prompts=arguments.prompts,
        samples=arguments.samples,
        token_scale=arguments.token_scale,
        tail=Tail(arguments.tail, arguments.longest),
        engine=EngineRates(keeps_cache=arguments.pause == "in_place"),
    )
    modes: list[Mode] = []
    with open_table(console, "simulating", *_HEADS) as (table, progress):
        try:
            staleness = split_numbers(arguments.staleness, "--staleness")
            for mode in measure_async(bench, staleness, arguments.seeds, progress, streams=arguments.streaming):
                modes.append(mode)
                progress(f"staleness {mode.max_staleness}, {mode.split}: {sum(mode.seconds) / len(mode.seconds):.1f} s")
        finally:  # the speed-up is over the fastest of all synchronous rows
            for mode in modes:
                table.add_row(*_row(mode, modes))
    console.print(
        f"{bench.steps} steps of {bench.prompts} groups of {bench.samples} episodes, {arguments.seeds} seeds, virtual seconds. "
        "GPUs: of engines + learner, or shared by both in turns. Speed-up: over the fastest synchronous row, mean and range "
        "over seeds. Age of trained tokens in versions; by length: its mean over quarters of the tokens, from short episodes "
        "to long ones. dropped: episodes that began and were not trained. Rates are those of a 0.6B model on an H200"
    )


def _row(mode: Mode, modes: list[Mode]) -> list[str]:
    import numpy as np

    synchronous = [mode for mode in modes if not mode.max_staleness]
    base = min(synchronous, key=lambda mode: sum(mode.seconds))
    ratios = [slow / fast for slow, fast in zip(base.seconds, mode.seconds, strict=True)]
    ages_N = np.concatenate([outcome.ages_N for outcome in mode.outcomes])
    quarters = np.mean([outcome.ages_by_length for outcome in mode.outcomes], axis=0)
    return [
        f"{mode.max_staleness}{', streaming' if mode.streams else ''}",
        str(mode.split),
        f"{np.mean(mode.seconds):.1f}",
        f"{np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{ages_N.mean():.2f}",
        f"{np.percentile(ages_N, 95):.0f}",
        str(ages_N.max()),
        " ".join(f"{age:.2f}" for age in quarters),
        f"{np.mean([outcome.engines_idle for outcome in mode.outcomes]):.2f}",
        f"{np.mean([outcome.learner_idle for outcome in mode.outcomes]):.2f}",
        str(sum(outcome.admitted - outcome.trained for outcome in mode.outcomes)),
    ]
