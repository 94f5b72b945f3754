"""Services of hosted tools: their options, their server's configuration, and the client that a run uses."""

from __future__ import annotations

import argparse
import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.config.base import Section
from agentrl.config.toolserver import ToolServerConfig
from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_private
from agentrl.core.errors import ConfigError
from agentrl.core.registry import lookup_tool
from agentrl.core.tool import Tool, ToolService
from agentrl.sandbox.registry import backend_class, check_images
from agentrl.toolserver.hosted_tool import HostedTool, PlainTool
from agentrl.toolserver.options import RunOptions, make_server_config, read_options, read_section

if TYPE_CHECKING:
    from agentrl.core.task import TaskSet
    from agentrl.core.tool import ToolClient
    from agentrl.toolserver.client.client import ToolServerClient
    from agentrl.toolserver.in_process import LocalToolClient

_LOCAL: dict[tuple[type[HostedService], str, str], LocalToolClient] = {}


class HostedService(ToolService):
    """A registered tool that a tool server hosts: one `HostedTool`, or several that share their sessions.

    Example::

        class DiceService(HostedService):
            name = "dice"
            Options = DiceOptions          # a Section
            needs_sandbox = False

            def create_tools(self, options: DiceOptions) -> Sequence[HostedTool]:
                return [Dice(options.sides)]
    """

    Options: ClassVar[type[Section]] = Section
    """The tool's own options: ``tools.NAME.options`` in a run, ``tools.NAME`` at a server."""
    needs_sandbox: ClassVar[bool] = False
    """Whether its tools run code in a sandbox."""
    stateless: ClassVar[bool] = False
    """Whether all its tools are `StatelessTool`: then a run opens no sessions, and sends their calls in batches."""
    resumable: ClassVar[bool] = False
    """Whether its tools continue in a session of another server process by the ids of their calls: then episodes
    outlive the server, and a resumed run continues with them."""

    def __init_subclass__(cls) -> None:
        """Set ``sandboxed``, with which a run passes its ``sandbox`` section."""
        super().__init_subclass__()
        cls.sandboxed = cls.needs_sandbox

    @abstractmethod
    def create_tools(self, options: Any) -> Sequence[HostedTool]:
        """Return the tools, not started yet; ``options`` is an instance of `Options`.

        Raises:
            ConfigError: the options contradict each other.
        """

    def tools(self, options: Mapping[str, Any]) -> tuple[Tool, ...]:
        """Return the tools that a policy may call, for these options of a run."""
        hosted_tools = self.create_tools(self._read(options).tool)
        return tuple(replace(tool.spec, server=self.name) for tool in hosted_tools)

    def make(self, options: Mapping[str, Any]) -> Sequence[HostedTool]:
        """Return the tools for the options that a server's file has under ``tools.NAME``."""
        return self.create_tools(read_section(self.Options, options, f"tools.{self.name}."))

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add ``--config FILE`` and ``key=value``."""
        parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with the sections server, sandbox, tools")
        parser.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help=f"settings over those of the file: {self.name}.OPTION=…, server.max_sessions=…, sandbox.backend=…",
        )

    def serve(self, arguments: argparse.Namespace) -> None:
        """Serve until SIGTERM or SIGINT."""
        config = make_server_config(arguments.config, arguments.overrides, [self.name])
        serve(config, host=arguments.host, port=arguments.port)

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the options, and that the sandbox's program or daemon exists."""
        parsed = self._read(options)
        self.create_tools(parsed.tool)
        if self.needs_sandbox:
            check_images(parsed.sandbox)
            backend_class(parsed.sandbox.backend).check(parsed.sandbox)

    def check_server(self, url: str, options: Mapping[str, Any]) -> None:
        """Check that all servers answer, have the tools, and take the token."""
        asyncio.run(self._check_server(url, options))

    async def _check_server(self, url: str, options: Mapping[str, Any]) -> None:
        client = self.client(url, options)
        try:
            await client.check()
        finally:
            await client.aclose()

    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Write the server's configuration to ``folder/server.yaml``."""
        return self._write_config(self._read(options), folder)

    def _write_config(self, parsed: RunOptions[Any], folder: Path) -> Sequence[str]:
        tool_options = parsed.tool.model_dump(mode="json")
        config = ToolServerConfig(server=parsed.server, sandbox=parsed.sandbox, tools={self.name: tool_options})
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "server.yaml"
        write_private(file, dump_yaml(config.model_dump(mode="json")))  # it may hold a token
        return [f"--config={file.resolve()}"]

    def client(self, url: str, options: Mapping[str, Any]) -> ToolServerClient:
        """Return a client of one server, or of several whose addresses are separated by commas."""
        from agentrl.toolserver.client.client import ToolServerClient

        parsed = self._read(options)
        config = parsed.client
        if config.token is None and parsed.server.token is not None:
            config = config.model_copy(update={"token": parsed.server.token})
        return ToolServerClient(
            url,
            config,
            key=f"tools.{self.name}.url",
            tools=self.tools(options),
            stateless=self.stateless,
            resumable=self.resumable,
        )

    def _read(self, options: Mapping[str, Any]) -> RunOptions[Section]:
        return read_options(self.Options, options, self.name)

    def local_client(
        self, corpora: Mapping[str, Iterable[Mapping[str, str]]], options: Mapping[str, Any]
    ) -> ToolClient:
        """Return a client that runs the tools in this process, sandboxed as at their server.

        The same options give the same client: a sandbox's backend is started and tried once in a process.
        """
        from agentrl.toolserver.in_process import LocalToolClient

        self.check(options)
        parsed = self._read(options)
        key = (type(self), parsed.tool.model_dump_json(), parsed.sandbox.model_dump_json())
        if key not in _LOCAL:
            sandbox = parsed.sandbox if self.needs_sandbox else None
            _LOCAL[key] = LocalToolClient(partial(self.create_tools, parsed.tool), sandbox)
        return _LOCAL[key]


class PlainService(HostedService):
    """The server of an `agentrl.Tool`; `find_service` makes one for a tool."""

    tool: ClassVar[Tool]

    def create_tools(self, options: Section) -> Sequence[HostedTool]:
        """Return the tool alone."""
        return [PlainTool(self.tool)]


def find_service(name: str) -> ToolService:
    """Return the service of a registered tool, or of the `agentrl.Tool` that ``path/to/file.py:name`` refers to.

    Raises:
        UnknownNameError: nothing has that name.
        ConfigError: the file, or the name in it, does not exist or is no tool.
    """
    tool = lookup_tool(name)
    if not isinstance(tool, Tool):
        return tool
    service: PlainService = type("PlainService", (PlainService,), {"name": name, "tool": tool})()
    return service


def make_tools(config: ToolServerConfig) -> list[HostedTool]:
    """Return the tools that a server's configuration names, not started yet.

    Raises:
        UnknownNameError: no tool of that name is registered.
        ConfigError: options that do not fit, a tool with a server of another kind, or two tools of one name.
    """
    tools: dict[str, HostedTool] = {}
    for name, options in config.tools.items():
        for tool in _make(name, options):
            if tool.spec.name in tools:
                raise ConfigError(f"tools.{name}: there is a tool {tool.spec.name!r} at this server already")
            tools[tool.spec.name] = tool
    return list(tools.values())


def _make(name: str, options: Mapping[str, Any]) -> Sequence[HostedTool]:
    if _is_mcp(options):
        service, options = find_service("mcp"), options["mcp"]
        service = type(type(service).__name__, (type(service),), {"name": name})()  # its messages name tools.NAME
    else:
        service = find_service(name)
    if not isinstance(service, HostedService):
        raise ConfigError(
            f"tools.{name}: {name} is not a hosted tool; start its server with agentrl tools serve {name}"
        )
    return service.make(options)


def _is_mcp(options: Mapping[str, Any]) -> bool:
    """Return whether ``tools.NAME`` configures an MCP server under a name that the user chose."""
    return set(options) == {"mcp"}


def needs_sandbox(config: ToolServerConfig) -> bool:
    """Return whether any tool of a server runs code in a sandbox."""
    services = (find_service(name) for name, options in config.tools.items() if not _is_mcp(options))
    return any(isinstance(service, HostedService) and service.needs_sandbox for service in services)


def serve(config: ToolServerConfig, *, host: str, port: int) -> None:
    """Serve all tools of a configuration until SIGTERM or SIGINT.

    Raises:
        UserError: the configuration cannot be used on this machine.
        PortInUseError: something else listens on the port.
    """
    from agentrl.toolserver.server.server import serve_tools

    tools = make_tools(config)
    serve_tools(tools, config, host=host, port=port, sandboxed=needs_sandbox(config))
