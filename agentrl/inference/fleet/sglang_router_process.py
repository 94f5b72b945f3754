"""The process of ``sglang-router``, and its list of workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from agentrl.core.child_process import LOOPBACK, ChildProcess, reserve_port
from agentrl.core.errors import EngineError
from agentrl.core.extras import require
from agentrl.inference.client.http import EngineHttp, read_json
from agentrl.inference.launch.processes import GUARD, EngineProcess, command_flags

_OPTIONS: dict[str, Any] = {
    # All turns of a session, which is the routing key, go to one engine; a new session to the engine with the fewest requests.
    "policy": "manual",
    "assignment-mode": "min_load",
    "max-idle-secs": 3600,
    # The fleet monitors the engines, and its sampler sends lost requests again.
    "disable-retries": True,
    "disable-circuit-breaker": True,
    "disable-health-check": True,
    # An engine is healthy before it is added; an unhealthy one must not appear in the list much later.
    "worker-startup-timeout-secs": 5,
    "worker-startup-check-interval": 1,
    "history-backend": "none",
    "log-level": "warn",
}


def require_router() -> None:
    """Raise `MissingError` if ``sglang-router`` is not installed."""
    require("sglang_router", "sampler.router=sglang (builtin needs none)")


def launch_router(log: Path, *, request_timeout_s: float, start_timeout_s: float) -> EngineProcess:
    """Start ``sglang-router`` without engines, on a free port of this machine, and wait until it answers.

    Args:
        log: file for its output.
        request_timeout_s: timeout of the sender of a request; the router waits longer.
        start_timeout_s: timeout of the start in seconds.

    Raises:
        MissingError: it is not installed.
        EngineError: it ended or did not answer in time; the message has its last log lines.
    """
    require_router()
    guard = [sys.executable, "-S", str(GUARD)]
    # Its metrics server cannot be disabled, and the default port of that may be in use.
    with reserve_port(LOOPBACK) as port, reserve_port(LOOPBACK) as metrics_port:
        flags = _OPTIONS | {
            "host": LOOPBACK,
            "port": port,
            "prometheus-host": LOOPBACK,
            "prometheus-port": metrics_port,
            "request-timeout-secs": int(2 * request_timeout_s) + 1,
        }
        command = [*guard, sys.executable, "-m", "sglang_router.launch_router", *command_flags(flags)]
        child = ChildProcess.start(command, log=log, name="sglang-router", error=EngineError)
        url = f"http://{LOOPBACK}:{port}"
        child.wait_healthy(f"{url}/liveness", start_timeout_s)
    return EngineProcess(url, child, grace_s=0.0)


class Workers:
    """The workers of a router, by URL. The router adds and removes them some time after the request."""

    def __init__(self, http: EngineHttp) -> None:
        """Manage the workers of the router that ``http`` reaches."""
        self._http = http

    async def listed(self) -> dict[str, str]:
        """Return the router's id of each engine that it sends requests to, by URL."""
        async with self._http.request("GET", "/workers", once=True) as reply:
            return {worker["url"]: worker["id"] for worker in (await read_json(reply))["workers"]}

    async def add(self, url: str) -> None:
        """Request that an engine is added."""
        async with self._http.request("POST", "/workers", {"url": url}):
            pass

    async def remove(self, worker_id: str) -> None:
        """Request that an engine is removed, by the router's id."""
        async with self._http.request("DELETE", f"/workers/{worker_id}"):
            pass
