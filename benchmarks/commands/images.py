"""``agentrl bench images``."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.commands.output import open_table

HELP = "time and memory of episodes with pictures, over those of text of the same length"
_HEADS = ("part", "tokens", "s with pictures", "s of text", "ratio", "MiB with pictures", "MiB of text", "ratio of MiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model", default="geometry-warm", help="a vision-language model, as model.path")
    parser.add_argument("--episodes", type=int, default=64, help="episodes at the same time")
    parser.add_argument("--pictures", type=int, default=8, help="pictures of an episode, over four turns")
    parser.add_argument("--side-px", type=int, default=32, help="sides of a picture")
    parser.add_argument("--threads", type=int, default=2, help="threads of engine and learner")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from agentrl.models.resolve import resolve_model
    from benchmarks.images import ImageBench, measure_images

    model = resolve_model(arguments.model)
    bench = ImageBench(model, arguments.episodes, arguments.pictures, arguments.side_px, arguments.threads)
    with open_table(console, "sampling and training", *_HEADS) as (table, _):
        for part, pictures, text in measure_images(bench):
            seconds = (f"{pictures.seconds:.2f}", f"{text.seconds:.2f}", f"{pictures.seconds / text.seconds:.2f}")
            memory = (f"{pictures.mib:.0f}", f"{text.mib:.0f}", f"{pictures.mib / text.mib:.2f}")
            table.add_row(part, f"{pictures.tokens:,}", *seconds, *memory)
    console.print("MiB: the most resident memory of a process, less that before its episodes or its two steps")
