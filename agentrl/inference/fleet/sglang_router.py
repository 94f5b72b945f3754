"""``sglang-router`` in front of the engines: it routes requests, and the run keeps its list of workers up to date."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from agentrl.config.engine_groups import engine_group, training_engines
from agentrl.config.sampler import SamplerConfig
from agentrl.core.background import first_ended
from agentrl.core.child_process import LOOPBACK, ChildProcess, reserve_port
from agentrl.core.errors import EngineError
from agentrl.core.extras import require
from agentrl.inference.client.engine_state import EngineState
from agentrl.inference.client.generation import GenerationClient
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply, read_json
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.inference.launch.launcher import launch
from agentrl.inference.launch.processes import GUARD, EngineProcess, command_flags
from agentrl.obs.waiting import waiting

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


def launch_router(
    log: Path, *, request_timeout_s: float, start_timeout_s: float, disaggregated: bool = False
) -> EngineProcess:
    """Start ``sglang-router`` without engines, on a free port of this machine, and wait until it answers.

    Args:
        log: file for its output.
        request_timeout_s: timeout of the sender of a request; the router waits longer.
        start_timeout_s: timeout of the start in seconds.
        disaggregated: whether each request goes to an engine for prefill and to one for decode.

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
            "pd-disaggregation": disaggregated,
        }
        command = [*guard, sys.executable, "-m", "sglang_router.launch_router", *command_flags(flags)]
        child = ChildProcess.start(command, log=log, name="sglang-router", error=EngineError)
        url = f"http://{LOOPBACK}:{port}"
        child.wait_healthy(f"{url}/liveness", start_timeout_s)
    return EngineProcess(url, child, grace_s=0.0)


async def list_workers(http: EngineHttp) -> dict[str, str]:
    """Return a router's id of each engine that it sends requests to, by URL; it adds and removes them after the request."""
    async with http.request("GET", "/workers", once=True) as reply:
        return {worker["url"]: worker["id"] for worker in (await read_json(reply))["workers"]}


async def read_bootstrap_port(engine: SGLangClient) -> int:
    """Return the port at which an engine for prefill hands over what it has computed.

    Raises:
        EngineError: it does not report one.
    """
    info = await engine.control.call("/server_info", None)
    port = info.get("disaggregation_bootstrap_port") if isinstance(info, dict) else None
    if not isinstance(port, int):
        raise EngineError(
            f"the engine at {engine.url} reports disaggregation_bootstrap_port={port!r} at /server_info, not a number"
        )
    return port


_log = logging.getLogger(__name__)

_NAME = "sglang-router"
_CHECK_S = 0.2
"""Seconds between two checks of whether the router's process runs."""
_POLL_S = 0.02
_RETRY_ADD_S = 6.0
"""Seconds until an engine is added again: the router has given up the first attempt by then."""


class SGLangRouter(GenerationClient):
    """The engines of a run behind ``sglang-router``, as one `Sampler` that a `RoutedSampler` uses like a single engine.

    Generation requests go through the router with their session as routing key; all other requests go directly to the
    engines. While an engine is paused or its weights are updated, no request is sent, because the router might choose
    this engine. Aborts are sent to all engines. If the router dies or hangs it is restarted, and its workers are added
    again.
    """

    def __init__(
        self,
        sampler: RoutedSampler,
        config: SamplerConfig,
        log: Path,
        vocabulary: Vocabulary,
        *,
        knows_ages: bool = False,
    ) -> None:
        """Create the router; `start` starts its process.

        Args:
            sampler: this object is added to it while there are engines.
            config: ``router`` is ``sglang``.
            log: file for the router's output.
            vocabulary: of the policy, with which replies are checked.
            knows_ages: see `GenerationClient`.
        """
        self.on_lost: Callable[[str], None] = lambda name: None
        self._sampler = sampler
        self._config = config
        self._log = log
        # The port is known once the process runs.
        super().__init__(EngineHttp(f"http://{LOOPBACK}", config.request_timeout_s), vocabulary, knows_ages=knows_ages)
        self._control = EngineHttp(self._http.url, config.stall_timeout_s)
        numbers = range(training_engines(config))
        groups = {f"engine-{number}": engine_group(config, number)[0] for number in numbers}
        self._serves = {name: config.groups[group].serves for name, group in groups.items() if group}
        """``prefill`` or ``decode`` by engine, if each does one of the two."""
        self._engines: dict[str, SGLangClient] = {}
        """The engines that the router is to use, by name."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when the engines change."""
        self._process: EngineProcess | None = None
        self._restarts = 0
        self._open = False
        """Requests may be sent."""
        self._task: asyncio.Task[None] | None = None
        sampler.on_lost = self._lost

    async def start(self) -> None:
        """Start the router's process and supervise it.

        Raises:
            MissingError: sglang-router is not installed.
            EngineError: it does not start; the message has its last log lines.
        """
        await self._launch()
        self._task = asyncio.create_task(self._supervise(), name=_NAME)
        self._task.add_done_callback(self._on_task_end)

    async def aclose(self) -> None:
        """Stop the router's process and close all connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        await asyncio.gather(self._http.aclose(), self._control.aclose())

    def check(self) -> None:
        """Raise `EngineError` if the router has no restarts left, or does not accept an engine."""
        if self._task is not None and self._task.done():
            self._task.result()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Fail all requests if the supervision ends with an error."""
        if not task.cancelled():
            self.fail(str(task.exception()))

    # Engines

    def add(self, name: str, sampler: SGLangClient) -> None:
        """Add an engine to the router's workers."""
        assert name not in self._engines, name
        self._engines[name] = sampler
        self._notify_change()

    def remove(self, name: str) -> None:
        """Remove an engine from the router's workers; its requests go to others."""
        if self._engines.pop(name, None) is not None:
            self._notify_change()

    def fail(self, why: str) -> None:
        """Fail all requests, now and later: no engine is left."""
        self._sampler.fail(why)

    def _notify_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._sampler.on_change()
        if not self._parallel:
            self._close()

    def _lost(self, name: str) -> None:
        """Report a lost request for every engine: the router does not tell which one had it."""
        for engine in self._engines:
            self.on_lost(engine)

    # Sampler

    async def abort(self, request_id: str) -> None:
        """Stop a request at the engine that has it, and wait until its `generate` ends.

        Raises:
            SamplerError: no engine accepts the abort.
        """
        aborts = [self.abort_at(request_id, engine.stop) for engine in self._engines.values()]
        results = await asyncio.gather(*aborts, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors and len(errors) == len(results):
            raise errors[0]

    @override
    def _engine_state(self) -> EngineState:
        states = [engine.state() for engine in self._engines.values()]
        unfit = next((state.unfit for state in states if state.unfit), "")
        return replace(super()._engine_state(), abort_urls=[state.url for state in states], unfit=unfit)

    @override
    def _weights_owner(self) -> str:
        return next((engine.updates.sent_owner for engine in self._engines.values()), "")

    @property
    def ready(self) -> bool:
        """Whether all engines accept requests now."""
        return all(engine.ready for engine in self._engines.values())

    async def wait_ready(self) -> None:
        """Wait until all engines accept requests; `SamplerError` if one has an incomplete weight update."""
        while waiting_for := [engine for engine in self._engines.values() if not engine.ready]:
            changed = self._changed
            async with first_ended(waiting_for[0].wait_ready(), changed.wait()) as (ready, _):
                if not changed.is_set():
                    ready.result()

    # The router's process

    async def _supervise(self) -> None:
        """Keep the router running, with the current engines as workers.

        Raises:
            EngineError: it has no restarts left, or does not accept an engine.
        """
        every, limit = self._config.health_interval_s, self._config.stall_timeout_s
        while True:
            changed, until = self._changed, time.monotonic() + every
            why = None
            try:
                await self._update_workers()
                while not changed.is_set() and time.monotonic() < until and self._exit_error() is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), min(_CHECK_S, every))
            except TimeoutError:
                why = f"sglang-router has not answered for sampler.stall_timeout_s={limit:g} s. {self._tail()}"
            except (ErrorReply, *CONNECTION_ERRORS) as error:
                _log.warning("sglang-router at %s: %s %s", self._http.url, type(error).__name__, error)
                await asyncio.sleep(_CHECK_S)
            why = self._exit_error() or why
            if why is not None:
                await self._restart(why)

    async def _update_workers(self) -> None:
        """Make the router's workers equal to the current engines, then allow requests."""
        retry_at: dict[str, float] = {}
        begun, dropped = time.monotonic(), False
        with waiting("engine", _NAME, "to update its workers"):
            while (worker_ids := await list_workers(self._control)).keys() != (engine_urls := self._urls()):
                for url in worker_ids.keys() - engine_urls:
                    dropped = True
                    async with self._control.request("DELETE", f"/workers/{worker_ids[url]}"):
                        pass
                for url in engine_urls - worker_ids.keys():
                    if time.monotonic() >= retry_at.get(url, 0.0):
                        retry_at[url] = time.monotonic() + _RETRY_ADD_S
                        await self._add_worker(url)
                if time.monotonic() - begun > self._config.start_timeout_s:
                    raise EngineError(
                        f"sglang-router has the workers {sorted(worker_ids)} instead of {sorted(engine_urls)} after "
                        f"sampler.start_timeout_s={self._config.start_timeout_s:g} s. {self._tail()}"
                    )
                await asyncio.sleep(_POLL_S)
        if dropped and self._config.urls:
            # Requests of an engine that is killed fail. Those of an attached engine that hangs would wait forever, and
            # only the router knows which they are: all requests are sent again.
            self._close()
        self._open_for_requests(self._parallel)

    @property
    def _parallel(self) -> int:
        """Engines that may sample at the same time: all, or those for decode if there is one for prefill; 0: none."""
        kinds = Counter(self._serves.get(name, "") for name in self._engines)
        if self._serves:
            return kinds["decode"] if kinds["prefill"] else 0
        return kinds[""]

    async def _add_worker(self, url: str) -> None:
        """Request that the router adds an engine. It is requested again later if it does not come into the list."""
        body: dict[str, object] = {"url": url}
        name = next((name for name, engine in self._engines.items() if engine.url.rstrip("/") == url), None)
        if name is None:
            return  # it was removed meanwhile
        if (serves := self._serves.get(name)) is not None:
            body["worker_type"] = serves
        if serves == "prefill":
            try:
                body["bootstrap_port"] = await read_bootstrap_port(self._engines[name])
            except EngineError as error:
                _log.warning("%s: %s", name, error)
                return
        async with self._control.request("POST", "/workers", body):
            pass

    def _urls(self) -> set[str]:
        return {engine.url.rstrip("/") for engine in self._engines.values()}

    def _open_for_requests(self, engines: int) -> None:
        if isinstance(self._config.max_running, int):
            self._sampler.set_max_running(self._config.max_running * engines)
        if engines and not self._open:
            self._open = True
            self._sampler.add(_NAME, self)

    def _close(self) -> None:
        """Stop sending requests; those in progress are sent again after `_open_for_requests`."""
        self._open = False
        self._sampler.remove(_NAME)

    @property
    def _running(self) -> EngineProcess:
        assert self._process is not None, "call start first"
        return self._process

    def _exit_error(self) -> str | None:
        try:
            self._running.check()
        except EngineError as error:
            return str(error)
        return None

    def _tail(self) -> str:
        return f"The end of its log {self._log}:\n{self._running.log_tail()}"

    async def _restart(self, why: str) -> None:
        most = self._config.max_restarts
        self._close()
        await asyncio.to_thread(self._running.stop)
        if self._restarts >= most:
            raise EngineError(
                f"sglang-router was restarted {self._restarts} times (sampler.max_restarts={most}): {why}"
            )
        self._restarts += 1
        _log.warning("%s\nIt is restarted (%d of %d)", why, self._restarts, most)
        await self._launch()

    async def _launch(self) -> None:
        times = {"request_timeout_s": self._config.request_timeout_s, "start_timeout_s": self._config.start_timeout_s}
        start = partial(launch_router, self._log, disaggregated=bool(self._serves), **times)
        self._process = await launch(start, _NAME)
        self._http.url = self._control.url = self._process.url
