"""Starts tool servers for a run: one process each, which ends with the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.core.child_process import LOOPBACK, ChildProcess, reserve_port
from agentrl.core.errors import ConfigError, ToolServerError
from agentrl.core.registry import tool_definition

_USER_ERROR = 2
"""Exit status of ``agentrl`` for the user's mistakes."""


class ToolServerProcess(ChildProcess):
    """A running tool server, made by `launch_tool`. Ends with `stop`, with its context, or with this process."""

    url: str
    """Its address."""


def launch_tool(
    name: str, arguments: Sequence[str], *, log: Path, port: int = 0, host: str = LOOPBACK, timeout_s: float = 300.0
) -> ToolServerProcess:
    """Start ``agentrl tools serve NAME`` and block until ``GET /health`` answers 200.

    Args:
        name: the tool's registered name.
        arguments: from `ToolService.launch_arguments`.
        log: the server's output is appended here.
        port: ``tools.NAME.port``; 0 takes a free one.
        host: the address that it listens on.
        timeout_s: how long it may take to answer; building an index counts.

    Raises:
        PortInUseError: something else listens on the port.
        ConfigError: the server refused its options or the files they name.
        ToolServerError: the server died or stayed silent; with the end of its log.
    """
    with reserve_port(host, port, key=f"tools.{name}.port") as bound_port:
        command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", name]
        if (definition := tool_definition(name)) is not None:
            command.append(f"--from={definition}")
        child = ToolServerProcess.start(
            [*command, f"--host={host}", f"--port={bound_port}", *arguments],
            log=log,
            name=f"tool server {name!r}",
            error=ToolServerError,
        )
        child.url = f"http://{host}:{bound_port}"
        try:
            child.wait_healthy(f"{child.url}/health", timeout_s)
        except ToolServerError as error:
            if child.exit_code() == _USER_ERROR:
                raise ConfigError(str(error)) from None
            raise
        except BaseException:
            child.stop()  # Ctrl-C while it starts
            raise
    return child
