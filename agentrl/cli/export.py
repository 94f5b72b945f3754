"""``agentrl export RUN OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.core.lineup import MAIN
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("source", help="folder of a run, whose newest checkpoint is exported, or of a checkpoint")
    parser.add_argument(
        "out", type=Path, help="Hugging Face folder to write; of several policies one in it for each, by name"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the weights (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Export the policies of a checkpoint."""
    from agentrl.evaluation.checkpoint_model import exported_model
    from agentrl.models.export import check_free, export_model

    source = Path(exported_model(arguments.source, "agentrl export"))
    if not source.is_dir():
        raise ConfigError(f"{arguments.source} is no folder of a run or of a checkpoint")
    check_free(arguments.out)
    console = make_console()
    for out, adapters in _exports(source, arguments.out).items():
        export_model(source, out, arguments.dtype, adapters=adapters)
        exported = source if adapters is None else f"{source} with {adapters}"
        console.print(f"{exported} in {arguments.dtype}: {out}", soft_wrap=True)


def _exports(source: Path, out: Path) -> dict[Path, Path | None]:
    """Return the folders to write, each with the adapters of its policy; those of ``main`` are merged in ``source``."""
    policies = sorted(path for path in (source.parent / "policies").glob("*") if path.is_dir() and path.name != MAIN)
    return {out / path.name: path for path in policies} or {out: None}
