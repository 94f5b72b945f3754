"""``agentrl bench learner``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from agentrl.cli.options import add_plain_config_arguments, resolve_plain_config
from benchmarks.commands.output import open_table, split_names

if TYPE_CHECKING:
    from benchmarks.step_profile import StepProfile

HELP = "tokens/s and memory of optimizer steps, against other loops on the same model and rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--size", default="tiny", help="of the random model: tiny, tiny-moe, 0.6b, 4b, 8b, 14b or 30b-a3b-12"
    )
    parser.add_argument("--rows", type=int, default=48, help="rows of a step")
    parser.add_argument(
        "--workload", default="lognormal", help="lognormal, groups (with a common prompt) or forks (of episodes)"
    )
    parser.add_argument("--median-tokens", type=int, default=1636, help="of a row")
    parser.add_argument("--longest", type=int, default=4096, help="maximum tokens of a row")
    parser.add_argument("--steps", type=int, default=6, help="steps of each loop; the first two do not count")
    parser.add_argument(
        "--loops", default="", help="other loops: fsdp, megatron, hf, liger, compiled, trl; comma-separated"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="kernels to print of a profiled step, from the longest on"
    )
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.learner import LearnerBench, measure_learner

    config = resolve_plain_config(arguments)
    bench = LearnerBench(
        size=arguments.size,
        rows=arguments.rows,
        median_tokens=arguments.median_tokens,
        longest=arguments.longest,
        steps=arguments.steps,
        workload=arguments.workload,
        loops=split_names(arguments.loops),
        kernels=arguments.kernels,
    )
    heads = ("loop", "first s", "s a step", "tokens/s", "utilization", "GiB", "estimated")
    with open_table(console, "starting", *heads) as (table, progress):
        for times in measure_learner(config, bench, progress):
            memory = ("" if gib is None else f"{gib:.1f}" for gib in (times.peak_gib, times.estimated_gib))
            rates = (f"{times.tokens_per_s:,.0f}", f"{times.utilization:.3f}")
            table.add_row(times.name, f"{times.first_s:.1f}", f"{times.step_s:.3f}", *rates, *memory)
            if times.profile is not None:
                console.print(_profile_table(times.name, times.profile))
    console.print(
        "utilization: floating-point operations of the model (6 a parameter and token, the head's at trained tokens only, "
        "causal attention; none that were computed again) over those of a product of large bfloat16 matrices in the same "
        "time. The optimizer's step counts. Medians of the steps after the second; GiB: most memory of a GPU; estimated: "
        "what agentrl train --dry-run says of it"
    )


def _profile_table(name: str, profile: StepProfile) -> Table:
    """Return the kernels of a profiled step. The profiler slows the host down a little: idle shares are upper bounds."""
    title = (
        f"{name}: {profile.wall_s:.3f} s, GPU idle {1 - profile.busy_s / profile.wall_s:.1%}, {profile.kernels:,} kernels, "
        f"{profile.waits} waits of the host for {profile.waited_s:.3f} s"
    )
    table = Table("kernel", "count", "ms", "share of the step", title=title, title_justify="left")
    for kernel, count, seconds in profile.by_name:
        table.add_row(kernel, f"{count:,}", f"{1e3 * seconds:.1f}", f"{seconds / profile.wall_s:.1%}")
    return table
