"""``agentrl tools serve`` and ``agentrl tools sandbox``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agentrl.config.load import parse_override
from agentrl.config.merging import Tree, merge
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ToolServerConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import UserError
from agentrl.core.imports import load_module
from agentrl.core.registry import SANDBOXES, TOOLS, names


class _Parser(argparse.ArgumentParser):
    """The parser of an action. That of ``serve`` takes a tool's name as its first word, and then the tool's own options."""

    serves = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if self.serves:
            self._load_definition(words)
            has_tool_name = bool(words) and not words[0].startswith("-") and "=" not in words[0]
            self._add_tool_options(words.pop(0) if has_tool_name else None)
        return super().parse_known_args(words, namespace)

    def _load_definition(self, words: Sequence[str]) -> None:
        """Import the file or module that registers the tools, before their names are looked up."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--from", dest="definition")
        definition = parser.parse_known_args(words)[0].definition
        if definition is not None:
            load_module(definition, f"--from={definition}")

    def _add_tool_options(self, tool: str | None) -> None:
        self.set_defaults(tool=tool)
        if tool is None:
            _add_config_arguments(self)
            return
        from agentrl.toolserver.service import find_service

        self.prog += f" {tool}"
        try:
            find_service(tool).add_arguments(self)
        except UserError as error:
            self.error(str(error))


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s NAME [options of the tool]\n       %(prog)s --config FILE [key=value ...]"
    tool_names = ", ".join(names(TOOLS))
    parser.epilog = (
        f"NAME is a registered tool ({tool_names}), or file.py:name of an agentrl.Tool; "
        "'%(prog)s NAME --help' shows its options."
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="YAML with the sections server, sandbox, tools"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over those of the file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command; a tool adds its own."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    serve = actions.add_parser("serve", help="run the server of a tool, or of several")
    serve.serves = True
    serve.add_argument("--host", default=LOOPBACK, help="address to listen on; others than the loopback want a token")
    serve.add_argument("--port", type=int, default=8300, help="port to listen on; 0 takes a free one")
    serve.add_argument(
        "--from", metavar="FILE", help="Python file or module that registers the tool, to be imported first"
    )
    serve.set_defaults(act=_serve)
    sandbox = actions.add_parser(
        "sandbox", help="attempt what sandboxes must prevent on this machine, and show the result"
    )
    sandbox.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"registered name ({', '.join(names(SANDBOXES))}) or file.py:Class; repeat it for several; default: all "
        "registered ones that isolate",
    )
    sandbox.add_argument("overrides", nargs="*", metavar="key=value", help="such as sandbox.image=NAME")
    sandbox.set_defaults(act=_sandbox)


def run(arguments: argparse.Namespace) -> None:
    """Run the subcommand."""
    arguments.act(arguments)


def _serve(arguments: argparse.Namespace) -> None:
    from agentrl.toolserver.options import make_server_config
    from agentrl.toolserver.service import find_service, serve

    if arguments.tool is not None:
        find_service(arguments.tool).serve(arguments)
    else:
        serve(make_server_config(arguments.config, arguments.overrides), host=arguments.host, port=arguments.port)


def _sandbox(arguments: argparse.Namespace) -> None:
    from agentrl.obs.console import make_console
    from agentrl.sandbox.canary.check import survey
    from agentrl.sandbox.registry import backend_class

    config = _sandbox_config(arguments.overrides)
    console = make_console()
    backend_names = arguments.backend or _isolating_backends(console)
    backends = [backend_class(name)(config.model_copy(update={"backend": name})) for name in backend_names]
    console.print(asyncio.run(survey(backends)))


def _isolating_backends(console: Console) -> list[str]:
    """Return the registered backends that isolate; print which ones cannot be imported."""
    from agentrl.sandbox.registry import backend_class

    isolating = []
    for name in names(SANDBOXES):
        try:
            isolating += [name] if backend_class(name).isolated else []
        except UserError as error:  # of one package; the others are of use
            console.print(str(error), markup=False, soft_wrap=True)
    return isolating


def _sandbox_config(overrides: Sequence[str]) -> SandboxConfig:
    from agentrl.toolserver.options import read_section

    tree: Tree = {}
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return read_section(ToolServerConfig, tree, "").sandbox
