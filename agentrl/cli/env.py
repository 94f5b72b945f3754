"""``agentrl env list`` and ``agentrl env check``."""

from __future__ import annotations

import argparse
import inspect

from rich.table import Table

from agentrl.core.registry import ENVS, env_class, names
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list all registered environments")
    check = actions.add_parser("check", help="check an environment against Gymnasium's contract and agentrl's")
    check.add_argument("name", help="a registered environment, or path/to/file.py:Class")


def run(arguments: argparse.Namespace) -> None:
    """List or check."""
    console = make_console()
    if arguments.action == "list":
        table = Table("environment", "class", "about")
        for name in names(ENVS):
            cls = env_class(name)
            about = (inspect.getdoc(cls) or "").split("\n")[0]
            table.add_row(name, f"{cls.__module__}.{cls.__qualname__}", about)
        console.print(table)
        return
    cls = env_class(arguments.name, "agentrl env check")
    from agentrl.testing import check_env

    check_env(cls)
    console.print(f"[green]{arguments.name}: passes Gymnasium's check_env and agentrl's contract[/]")
