"""``agentrl bench containers``."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.commands.output import open_table

HELP = "starts of machines: plain docker run, opened cold, and from the warm pool"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--host", metavar="URL", help="address of a Docker daemon (DOCKER_HOST, or the usual socket)")
    parser.add_argument("--image", default="debian:12", help="an image with a shell that the daemon has (%(default)s)")
    parser.add_argument("--starts", type=int, default=20, help="starts of each measurement (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="machines at the same time (%(default)s)")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.containers import ContainersBench

    bench = ContainersBench(arguments.host, arguments.image, arguments.starts, arguments.concurrency)
    with open_table(console, "starting", "what", "start ms", "first command ms", "starts/s") as (table, progress):
        for times in bench.run(progress):
            table.add_row(times.name, f"{times.median_ms:.0f}", f"{times.command_ms:.0f}", f"{times.starts_per_s:.1f}")
    console.print(
        "start, first command: medians, one at a time; starts/s: several at a time, each removed after its first command. "
        "The warm pool is refilled meanwhile, so its starts/s are at most those of cold starts in the long run"
    )
