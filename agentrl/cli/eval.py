"""``agentrl eval``."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.cli.options import add_config_arguments, resolve_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--checkpoint", help="a run's folder, a checkpoint, or a model folder; default model.path")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a policy and print its figures."""
    from agentrl.eval import checkpoint_model, evaluate_policy

    extra = {"model": {"path": checkpoint_model(arguments.checkpoint)}} if arguments.checkpoint else None
    config = resolve_config(arguments, extra)
    console = Console()
    figures = asyncio.run(evaluate_policy(config, console))
    table = Table(title=f"{config.env.name}: {config.model.path}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}")
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
