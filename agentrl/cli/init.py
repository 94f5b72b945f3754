"""``agentrl init``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("project", type=Path, metavar="NAME", help="the project's name: a folder that is made here")


def run(arguments: argparse.Namespace) -> None:
    """Write the project and print the next commands."""
    from agentrl.project_template import create_project

    files = create_project(arguments.project)
    folder = files[0].parent
    console = make_console()
    names = ", ".join(str(file.relative_to(folder)) for file in files)
    console.print(f"wrote {folder}: {names}", soft_wrap=True)
    console.print("next:")
    for command in (
        f"cd {shlex.quote(str(arguments.project))}",
        "agentrl train --config config.yaml",
        "pip install -e '.[test]'",
        "python -m pytest",
    ):
        console.print(f"  {command}", soft_wrap=True)
