"""All engines of a run: started or attached side by side, watched, and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import AgentrlError, ConfigError
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.health import Engine, Monitor, Resend
from agentrl.inference.fleet.router import EngineRouter, RoutedSampler
from agentrl.inference.fleet.sglang_router import Gateway
from agentrl.inference.launch.launcher import Launcher, RunningEngine
from agentrl.obs.waiting import waiting


class Fleet:
    """The engines of a run behind one `Sampler`.

    An engine that dies or hangs is started again, gets the current weights, and its requests are sampled elsewhere.
    """

    def __init__(self, config: SamplerConfig, launcher: Launcher, logs: Path) -> None:
        """Start nothing yet.

        Args:
            config: how many engines of which kind, or where they run already.
            launcher: starts them, each as often as it has to be.
            logs: folder for ``router.log``.

        """
        self.sampler = RoutedSampler(config.max_running)
        self._gateway = Gateway(self.sampler, config, logs / "router.log") if config.router == "sglang" else None
        self._router: EngineRouter = self._gateway or self.sampler
        self._config = config
        self._launcher = launcher
        self._retired: list[SGLangClient] = []
        """Clients of engines that were started again: a request may still be using one."""
        self._engines: list[Engine] = []
        self._monitor = Monitor(self._engines, self._router, config, self._start_again)
        self._counted = (0, 0)

    async def start(self) -> None:
        """Start all engines side by side, or reach those that run, and begin to watch them.

        Raises:
            EngineError: one does not start; the message has its last log lines.
            ConfigError: at an address of ``sampler.url`` no healthy engine answers.

        """
        if self._gateway is not None:
            await self._gateway.start()
        if self._config.urls:
            for number, url in enumerate(self._config.urls):
                self._engines.append(await self._attached(number, url))
        else:
            started = [self._started(number) for number in range(self._config.engines)]
            results = await asyncio.gather(*started, return_exceptions=True)
            self._engines += [engine for engine in results if isinstance(engine, Engine)]  # `aclose` ends these
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        for engine in self._engines:
            self._router.add(engine.name, engine.client)
        self._monitor.start()

    async def aclose(self) -> None:
        """Stop all engines that were started here, and close all connections."""
        await self._monitor.aclose()
        if self._gateway is not None:
            await self._gateway.aclose()
        processes = [engine.process for engine in self._engines if engine.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))
        for client in (*self._retired, *(engine.client for engine in self._engines)):
            await client.aclose()

    @property
    def live(self) -> tuple[SGLangClient, ...]:
        """The clients of the engines that sample now; one that is being started again is not among them."""
        return tuple(engine.client for engine in self._engines if engine.live)

    def resend_with(self, resend: Resend, *, launch_in: AbstractAsyncContextManager[None] | None = None) -> None:
        """Have engines that were started again sample only once ``resend`` has brought them the current weights.

        Starting one again, its weights included, is inside of ``launch_in``.
        """
        self._monitor.resend = resend
        if launch_in is not None:
            self._monitor.launch_in = launch_in

    async def look(self) -> None:
        """Wait a moment, so that an engine that has just failed is no longer among those that are `live`."""
        await self._monitor.look()

    async def ended(self) -> None:
        """Wait until the engines that are not live have no process, and so no memory, any more.

        Raises:
            EngineError: no engine is left.

        """
        await self._monitor.ended()

    async def flush(self) -> None:
        """Drop the prefix caches."""
        await asyncio.gather(*(client.flush() for client in self.live))

    def check(self) -> None:
        """Raise `EngineError` where no engine is left, with the last log lines of the one that went last, or no router."""
        self._monitor.check()
        if self._gateway is not None:
            self._gateway.check()

    def figures(self) -> dict[str, float]:
        """Return how often engines were started again, and what share of the prompts since the last call the engines had
        in their prefix caches.
        """
        prompt, cached = self.sampler.prompt_tokens - self._counted[0], self.sampler.cached_tokens - self._counted[1]
        self._counted = (self.sampler.prompt_tokens, self.sampler.cached_tokens)
        figures = {"rollout/engine_restarts": float(self._monitor.restarts)}
        return figures | ({"rollout/cache_hit": cached / prompt} if prompt else {})

    # Engines

    async def _attached(self, number: int, url: str) -> Engine:
        client = self._client(number, url)
        if not await client.healthy():
            await client.aclose()
            raise ConfigError(f"sampler.url={url}: no healthy engine answers there")
        return Engine(f"engine-{number}", client, None)

    async def _started(self, number: int) -> Engine:
        process = await self._process(number)
        return Engine(f"engine-{number}", self._client(number, process.url), process)

    async def _start_again(self, engine: Engine) -> None:
        number = self._engines.index(engine)
        process = await self._process(number)
        self._retired.append(engine.client)
        engine.process, engine.client = process, self._client(number, process.url)

    def _client(self, number: int, url: str) -> SGLangClient:
        flights = self._gateway.flights if self._gateway is not None else None
        return SGLangClient(url, timeout_s=self._config.request_timeout_s, flights=flights, number=number)

    async def _process(self, number: int) -> RunningEngine:
        starting = asyncio.ensure_future(asyncio.to_thread(self._launcher.launch, number))
        try:
            with waiting("start", f"of engine-{number}"):
                return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(AgentrlError):  # it has ended by itself
                await asyncio.to_thread((await starting).stop)
            raise
