"""``sglang-router`` before the engines of a run: it says which engine samples, the run which engines take part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import AgentrlError, EngineError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.http import Refused, Transport
from agentrl.inference.client.requests import Flights
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.inference.fleet.sglang_router_process import Workers, launch_router
from agentrl.inference.launch.processes import LOOPBACK, EngineProcess
from agentrl.obs.waiting import waiting

_log = logging.getLogger(__name__)

_LANE = "sglang-router"
_LOOK_S = 0.2
"""Seconds between two looks at whether the router lives."""
_POLL_S = 0.02
_ASK_AGAIN_S = 6.0
"""Before it is asked once more to take an engine in: it has given up by then."""


class Gateway:
    """The engines of a run behind ``sglang-router``: one `Sampler`, and one way for the requests of a `RoutedSampler`.

    Requests go through the router, with their session as its routing key; everything else goes to the engines
    themselves. While one of them is paused or gets weights, no request is sent, as it could be for this one. Aborts go
    to all. The router is started again where it dies or hangs, and told the engines anew.
    """

    def __init__(self, sampler: RoutedSampler, config: SamplerConfig, log: Path) -> None:
        """Start nothing yet.

        Args:
            sampler: gets the way through the router while there are engines.
            config: ``router`` is ``sglang``.
            log: file that takes what the router prints.

        """
        self.on_lost: Callable[[str], None] = lambda name: None
        self._sampler = sampler
        self._config = config
        self._log = log
        # Its port is known once it runs.
        self._transport = Transport(f"http://{LOOPBACK}", config.request_timeout_s)
        self._control = Transport(self._transport.url, config.stall_timeout_s)
        self._workers = Workers(self._control)
        self.flights = Flights(self._transport, self)
        """The requests that any of the engines may have."""
        self._engines: dict[str, SGLangClient] = {}
        """Those that take part, by name."""
        self._changed = asyncio.Event()
        """Set, and replaced, when others take part."""
        self._process: EngineProcess | None = None
        self._restarts = 0
        self._open = False
        """Requests are let through."""
        self._task: asyncio.Task[None] | None = None
        sampler.on_lost = self._lost

    async def start(self) -> None:
        """Start the router and look after it from now on.

        Raises:
            MissingError: it is not installed.
            EngineError: it does not start; the message has its last log lines.
        """
        await self._launch()
        self._task = asyncio.create_task(self._tend(), name=_LANE)
        self._task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        """Stop the router."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        await asyncio.gather(self._transport.aclose(), self._control.aclose())

    def check(self) -> None:
        """Raise `EngineError` where the router is lost, or does not take an engine in."""
        if self._task is not None and self._task.done():
            self._task.result()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nobody tends the router any more, for whatever reason."""
        if not task.cancelled():
            self.fail(str(task.exception()))

    # Engines

    def add(self, name: str, sampler: SGLangClient) -> None:
        """Have the router give requests to an engine from now on."""
        assert name not in self._engines, name
        self._engines[name] = sampler
        self._change()

    def remove(self, name: str) -> None:
        """Have the router give no more requests to an engine; those that it has go to others."""
        if self._engines.pop(name, None) is not None:
            self._change()

    def fail(self, why: str) -> None:
        """Refuse all requests: no engine will ever be there again."""
        self._sampler.fail(why)

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if not self._engines:
            self._shut()

    def _lost(self, lane: str) -> None:
        """A request was lost on its way: who knows at which engine."""
        for name in self._engines:
            self.on_lost(name)

    # Sampler

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`."""
        return await self.flights.generate(prompt, params, session_id=session_id, request_id=request_id, policy=policy)

    async def abort(self, request_id: str) -> None:
        """Stop a request, at whichever engine has it, and wait until its `generate` ends.

        Raises:
            SamplerError: no engine can be told to.
        """
        told = [self.flights.abort(request_id, engine.stop) for engine in self._engines.values()]
        results = await asyncio.gather(*told, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if errors and len(errors) == len(results):
            raise errors[0]

    async def close_session(self, session_id: str) -> None:
        """Do nothing: the router forgets sessions that were silent for long."""

    @property
    def closed(self) -> bool:
        """Whether any engine takes no request now."""
        return any(engine.closed for engine in self._engines.values())

    async def opened(self) -> None:
        """Wait until all engines take requests; `SamplerError` where one must not sample with the weights it has."""
        while closed := [engine for engine in self._engines.values() if engine.closed]:
            changed = self._changed
            waits = [asyncio.ensure_future(closed[0].opened()), asyncio.ensure_future(changed.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not changed.is_set():
                    waits[0].result()
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    # The router

    async def _tend(self) -> None:
        """Keep the router running, with the engines that take part.

        Raises:
            EngineError: it dies too often, or does not take an engine in.
        """
        every, limit = self._config.health_interval_s, self._config.stall_timeout_s
        while True:
            changed, until = self._changed, time.monotonic() + every
            why = None
            try:
                await self._tell()
                while not changed.is_set() and time.monotonic() < until and self._death() is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), min(_LOOK_S, every))
            except httpx.TimeoutException:
                why = f"sglang-router has not answered for sampler.stall_timeout_s={limit:g} s. {self._tail()}"
            except (Refused, httpx.HTTPError) as error:
                _log.warning("sglang-router at %s: %s %s", self._transport.url, type(error).__name__, error)
                await asyncio.sleep(_LOOK_S)
            why = self._death() or why
            if why is not None:
                await self._start_again(why)

    async def _tell(self) -> None:
        """Make the router's list that of the engines that take part, then let requests through."""
        asked: dict[str, float] = {}
        begun, dropped = time.monotonic(), False
        with waiting("engine", _LANE, "takes engines in"):
            while (listed := await self._workers.listed()).keys() != (wanted := self._urls()):
                for url in listed.keys() - wanted:
                    dropped = True
                    await self._workers.remove(listed[url])
                for url in wanted - listed.keys():
                    if time.monotonic() >= asked.get(url, 0.0):
                        asked[url] = time.monotonic() + _ASK_AGAIN_S
                        await self._workers.add(url)
                if time.monotonic() - begun > self._config.start_timeout_s:
                    raise EngineError(
                        f"sglang-router has the engines {sorted(listed)} and not {sorted(wanted)} after "
                        f"sampler.start_timeout_s={self._config.start_timeout_s:g} s. {self._tail()}"
                    )
                await asyncio.sleep(_POLL_S)
        if dropped and self._config.urls:
            # The requests of an engine that we kill fail. Those of one that hangs and is not ours would wait for ever, and
            # only the router knows which they are: all begin anew.
            self._shut()
        self._let_through(len(wanted))

    def _urls(self) -> set[str]:
        return {engine.url.rstrip("/") for engine in self._engines.values()}

    def _let_through(self, engines: int) -> None:
        if self._config.max_running is not None:
            self._sampler.allow(self._config.max_running * engines)
        if engines and not self._open:
            self._open = True
            self._sampler.add(_LANE, self)

    def _shut(self) -> None:
        """Close the way for requests; those that are on it begin anew once it opens."""
        self._open = False
        self._sampler.remove(_LANE)

    @property
    def _running(self) -> EngineProcess:
        assert self._process is not None, "start comes first"
        return self._process

    def _death(self) -> str | None:
        try:
            self._running.check()
        except EngineError as error:
            return str(error)
        return None

    def _tail(self) -> str:
        return f"The end of its log {self._log}:\n{self._running.log_tail()}"

    async def _start_again(self, why: str) -> None:
        most = self._config.max_restarts
        self._shut()
        await asyncio.to_thread(self._running.stop)
        if self._restarts >= most:
            raise EngineError(
                f"sglang-router was started again {self._restarts} times (sampler.max_restarts={most}): {why}"
            )
        self._restarts += 1
        _log.warning("%s\nIt is started again (%d of %d)", why, self._restarts, most)
        await self._launch()

    async def _launch(self) -> None:
        config = self._config
        starting = asyncio.ensure_future(
            asyncio.to_thread(
                launch_router,
                self._log,
                request_timeout_s=config.request_timeout_s,
                start_timeout_s=config.start_timeout_s,
            )
        )
        try:
            with waiting("start", f"of {_LANE}"):
                self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(AgentrlError):  # it has ended by itself
                self._process = await starting  # `aclose` stops it
            raise
        self._transport.url = self._control.url = self._process.url
