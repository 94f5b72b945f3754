"""``agentrl train``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from rich.console import Console

from agentrl.cli.options import add_config_arguments, resolve_config
from agentrl.config.load import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


def run(arguments: argparse.Namespace) -> None:
    """Train, or print what would be trained."""
    config = resolve_config(arguments)
    from agentrl.preflight import check_run

    plan = check_run(config)
    if arguments.dry_run:
        sys.stdout.write(dump(config))
        Console(stderr=True).print("\n".join(plan), highlight=False)
        return
    from agentrl.session import run_training

    asyncio.run(run_training(config, resume=arguments.resume, console=Console(), command=_resume_command()))


def _resume_command() -> str:
    words = [word for word in sys.argv[1:] if word != "--resume"]
    return " ".join(["agentrl", *words, "--resume"])
