"""``agentrl env list`` and ``agentrl env check``."""

from __future__ import annotations

import argparse
import inspect
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl.config.load import parse_override
from agentrl.config.merging import merge
from agentrl.core.errors import UserError
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import ENVS, env_class, make_any_env, make_env, names
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list all registered environments")
    check = actions.add_parser(
        "check", help="check an environment against the contracts of Gymnasium or PettingZoo, and agentrl's"
    )
    check.add_argument("name", help="a registered environment, or path/to/file.py:Class")
    check.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options of its constructor, as env.options has them"
    )


def run(arguments: argparse.Namespace) -> None:
    """List or check."""
    console = make_console()
    if arguments.action == "list":
        table = Table("environment", "class", "about")
        for name in names(ENVS):
            try:
                cls = env_class(name)
            except UserError as error:  # of one package; the others are of use
                table.add_row(name, "", Text(str(error), style="red"))
                continue
            about = (inspect.getdoc(cls) or "").split("\n")[0]
            table.add_row(name, f"{cls.__module__}.{cls.__qualname__}", about)
        console.print(table)
        return
    name, key = arguments.name, f"agentrl env check {arguments.name} key=value"
    several = issubclass(env_class(name, "agentrl env check"), MultiAgentEnv)
    options: dict[str, Any] = {}
    for override in arguments.overrides:
        options = merge(options, parse_override(f"env.options.{override}")["env"]["options"])
    from agentrl.testing import check_env, check_multi_agent_env

    if several:
        check_multi_agent_env(partial(make_any_env, name, options, key))
        notes: tuple[str, ...] = ()
    else:
        notes = check_env(partial(make_env, name, options, key))
    for note in notes:
        console.print(f"note: {note}")
    tests = "PettingZoo's API and seed tests" if several else "Gymnasium's check_env"
    console.print(f"{name}: passes {tests} and agentrl's contract", style="green")
