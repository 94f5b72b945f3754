"""``agentrl export RUN OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.evaluation.checkpoint_model import checkpoint_model
from agentrl.models.export import export_model
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("source", help="folder of a run, whose newest checkpoint is exported, or of a checkpoint")
    parser.add_argument("out", type=Path, help="Hugging Face folder to write")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="of the weights (%(default)s)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Export the policy of a checkpoint."""
    source = Path(checkpoint_model(arguments.source))
    if not source.is_dir():
        raise ConfigError(f"{arguments.source} is no folder of a run or of a checkpoint")
    export_model(source, arguments.out, arguments.dtype)
    console = make_console()
    console.print(f"{source} in {arguments.dtype}: {arguments.out}", highlight=False, markup=False, soft_wrap=True)
