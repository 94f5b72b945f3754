"""``agentrl bench weights``."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from agentrl.cli.options import add_plain_config_arguments, resolve_plain_config
from benchmarks.commands.output import open_table, split_names, split_numbers

HELP = "seconds and GB/s of new weights into engines, by transport and bucket size"
_HEADS = ("model", "transport", "MiB", "GB", "ms", "gather", "pack", "request", "load", "GB/s", "plain", "share")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--sizes", default="0.6b,8b", help="of the random models: tiny, 0.6b, 4b, 8b, 14b; comma-separated"
    )
    parser.add_argument(
        "--transports", default="", help="ipc, distributed, disk, tensor, delta; what can be here unless set"
    )
    parser.add_argument(
        "--buckets", default="", help="sizes of a bucket, MiB, comma-separated; by default that of a run"
    )
    parser.add_argument("--repeats", type=int, default=3, help="counted pushes of each; disk always has one")
    parser.add_argument("--folder", type=Path, help="where disk writes; the temporary folder unless it is set")
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    asyncio.run(_run(arguments, console))


async def _run(arguments: argparse.Namespace, console: Console) -> None:
    from benchmarks.weights import WeightsBench, measure_weights

    config = resolve_plain_config(arguments)
    bench = WeightsBench(
        sizes=arguments.sizes.split(","),
        transports=split_names(arguments.transports),
        bucket_mib=split_numbers(arguments.buckets, "--buckets") if arguments.buckets else [None],
        repeats=arguments.repeats,
        folder=arguments.folder,
    )
    with open_table(console, "making models", *_HEADS) as (table, progress):
        async for sync in measure_weights(config, bench, progress):
            seconds = (sync.seconds, sync.gather_s, sync.pack_s, sync.request_s, sync.load_s)
            plain = ("", "") if sync.plain is None else (f"{sync.plain / 1e9:.1f}", f"{sync.rate / sync.plain:.2f}")
            sizes = (sync.size, sync.transport, str(sync.bucket_mib), f"{sync.bytes / 1e9:.2f}")
            table.add_row(*sizes, *(f"{1000 * value:.1f}" for value in seconds), f"{sync.rate / 1e9:.2f}", *plain)
    console.print(
        "MiB: limit of a bucket. ms: the whole update of all engines (sampler.engines), the check of their versions "
        "included. Parts: gather, until the buckets were complete, the cast from float32 included; pack, handles (ipc), "
        "copies to the CPU (tensor) or files (disk); request, as many requests without weights as there are buckets; load, "
        "transfer and load in the engine. "
        "GB/s: of pack, request and load. plain: GB/s of the same bytes copied on the same device (ipc) or broadcast to "
        "another process (distributed), in pieces of a bucket's size; share: GB/s over that. Medians; the learner is one rank "
        "in this process. Targets: ipc 200 GB/s at 8b and 60 at 0.6b; distributed 0.7 of plain at 8b and 0.4 at 0.6b"
    )
