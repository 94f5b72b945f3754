"""The program ``sglang-router`` as a process of its own, and the list of engines that it keeps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from agentrl.core.child_process import ChildProcess, held_port
from agentrl.core.errors import EngineError, MissingError
from agentrl.inference.client.http import Transport
from agentrl.inference.launch.processes import GUARD, LOOPBACK, EngineProcess, flags_of

_OPTIONS: dict[str, Any] = {
    # All turns of a session, which is the routing key, go to one engine; a new session to the one with the fewest requests.
    "policy": "manual",
    "assignment-mode": "min_load",
    "max-idle-secs": 3600,
    # Which engines take part is for those to say who watch them, and a lost request is sent again by who knows it.
    "disable-retries": True,
    "disable-circuit-breaker": True,
    "disable-health-check": True,
    # An engine is healthy before it is added; one that is not by then must not turn up in the list much later.
    "worker-startup-timeout-secs": 5,
    "worker-startup-check-interval": 1,
    "history-backend": "none",
    "log-level": "warn",
}


def require_router() -> None:
    """Raise `MissingError` where ``sglang-router`` is not installed."""
    if importlib.util.find_spec("sglang_router") is None:
        raise MissingError(
            "sampler.router=sglang: sglang-router is not installed; install it with `pip install 'agentrl[router]'`, or set "
            "sampler.router=builtin"
        )


def launch_router(log: Path, *, request_timeout_s: float, start_timeout_s: float) -> EngineProcess:
    """Start ``sglang-router`` without engines, on a free port of this machine, and wait until it answers.

    Args:
        log: file that takes what it prints.
        request_timeout_s: how long the sender of a request waits; the router waits longer.
        start_timeout_s: how long the start may take.

    Raises:
        MissingError: it is not installed.
        EngineError: it died or stayed silent; the message has its last log lines.
    """
    require_router()
    guard = [sys.executable, "-S", str(GUARD)]
    # It cannot be told to serve no figures, and its port for them is one that others want too.
    with held_port(LOOPBACK) as port, held_port(LOOPBACK) as figures:
        flags = _OPTIONS | {
            "host": LOOPBACK,
            "port": port,
            "prometheus-host": LOOPBACK,
            "prometheus-port": figures,
            "request-timeout-secs": int(2 * request_timeout_s) + 1,
        }
        command = [*guard, sys.executable, "-m", "sglang_router.launch_router", *flags_of(flags)]
        child = ChildProcess.start(command, log=log, name="sglang-router", error=EngineError)
        url = f"http://{LOOPBACK}:{port}"
        child.wait_healthy(f"{url}/liveness", start_timeout_s)
    return EngineProcess(url, child, grace_s=0.0)


class Workers:
    """The engines that a router knows, by address. It takes them in and drops them some time after it was told to."""

    def __init__(self, transport: Transport) -> None:
        """Ask the router behind ``transport``."""
        self._transport = transport

    async def listed(self) -> dict[str, str]:
        """Return its name for each engine that it sends requests to, by address."""
        reply = await self._transport.get("/workers", retries=0)
        return {worker["url"]: worker["id"] for worker in reply["workers"]}

    async def add(self, url: str) -> None:
        """Ask it to take an engine in."""
        await self._transport.post("/workers", {"url": url})

    async def remove(self, name: str) -> None:
        """Ask it to send no more requests to an engine, by the router's name for it."""
        await self._transport.delete(f"/workers/{name}")
