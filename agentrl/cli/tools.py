"""``agentrl tools serve NAME``."""

from __future__ import annotations

import argparse
import sys

from agentrl.registry import TOOLS, names, tool_service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; a tool adds its own."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    serve = actions.add_parser("serve", help="run a tool's server")
    tools = serve.add_subparsers(dest="tool", required=True, metavar="NAME")
    for name in names(TOOLS):
        one = tools.add_parser(name, help=f"serve {name}")
        one.add_argument("--host", default="127.0.0.1", help="address to listen on")
        one.add_argument("--port", type=int, default=8300, help="port to listen on")
        if name in sys.argv:
            tool_service(name).add_arguments(one)


def run(arguments: argparse.Namespace) -> None:
    """Serve until told to stop."""
    tool_service(arguments.tool).serve(arguments)
