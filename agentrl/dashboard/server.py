"""The process of the dashboard."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from pathlib import Path

import uvicorn

from agentrl.dashboard.app import make_app
from agentrl.dashboard.login import view_token
from agentrl.dashboard.runs import Runs
from agentrl.obs.console import make_console
from agentrl.toolserver.server.server import UVICORN, Server, listen

HOST, PORT = "127.0.0.1", 8642
"""Where it listens without ``--host`` and ``--port``."""


def serve_dashboard(root: Path, host: str = HOST, port: int = PORT) -> None:
    """Serve the page of all runs under a folder until SIGTERM or Ctrl-C.

    Args:
        root: the folder; runs that begin later are shown too.
        host: address to listen on; other than the loopback only with a token.
        port: 0 takes a free one.

    Raises:
        UserError: there is no such folder.
        PortInUseError: another process listens on ``port``.
        ConfigError: the address needs a token, or this machine does not have it.
    """
    runs, token = Runs(root), view_token(host)
    with listen(host, port, "--port, --host; port 0 is a free one") as listener:
        make_console().print(
            f"{root} is shown on {_address(listener)}; Ctrl-C ends it", highlight=False, soft_wrap=True
        )
        asyncio.run(_serve(runs, token, listener))


async def _serve(runs: Runs, token: str | None, listener: socket.socket) -> None:
    stopping = threading.Event()
    server = Server(uvicorn.Config(make_app(runs, token, stopping), **UVICORN))

    def stop() -> None:
        stopping.set()
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve(sockets=[listener])


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
