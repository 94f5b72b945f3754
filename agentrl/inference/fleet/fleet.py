"""The fleet: all engines of a run, started or attached concurrently, monitored, and stopped together."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from agentrl.config.engine_groups import engine_group, training_engines
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError, EngineError, EngineLostError, SamplerError
from agentrl.core.types import SamplingParams
from agentrl.inference.base import EngineControl
from agentrl.inference.client.generation import GenerationClient
from agentrl.inference.client.prefix_ages import age_metrics
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.concurrency import FIRST, ConcurrencyMonitor
from agentrl.inference.fleet.health import Engine, HealthMonitor, SyncWeights
from agentrl.inference.fleet.mirror import FleetMirror
from agentrl.inference.fleet.router import EngineRouter, RoutedSampler
from agentrl.inference.fleet.sglang_router import SGLangRouter
from agentrl.inference.launch.launcher import Launcher, launch

_IDLE_S = 5.0
"""How long the end of a run waits until an engine that is kept runs nothing."""


class LiveEngines(Protocol):
    """Engines of which some may be lost."""

    @property
    def live(self) -> Sequence[EngineControl]:
        """Those that serve requests now."""
        ...

    async def check_now(self) -> None:
        """Check all engines now, so that `live` has none that has just failed."""
        ...


async def call_live(engines: LiveEngines, call: Callable[[EngineControl], Awaitable[None]]) -> None:
    """Call all live engines concurrently. Errors of engines that turn out to be lost are ignored.

    Raises:
        EngineError: of a live engine.
    """
    called = engines.live
    results = await asyncio.gather(*(call(engine) for engine in called), return_exceptions=True)
    errors = {engine: result for engine, result in zip(called, results, strict=True) if result is not None}
    if errors:
        await engines.check_now()
    for engine, error in errors.items():
        if not isinstance(error, EngineError) or engine in engines.live:
            raise error


class Fleet:
    """The engines of a run behind one `Sampler`.

    An engine that dies or hangs is restarted and gets the current weights; its requests go to other engines.
    """

    def __init__(
        self,
        config: SamplerConfig,
        launcher: Launcher,
        logs: Path,
        *,
        vocabulary: Vocabulary,
        max_tokens: int,
        prefix_cache: str = "drop",
        restores_weights: bool = False,
        group: str = "",
    ) -> None:
        """Create a fleet; `start` starts its engines.

        Args:
            config: number and backend of the engines, or the URLs of running ones.
            launcher: starts and restarts engines.
            logs: folder of ``router.log``.
            vocabulary: of the policy.
            max_tokens: ``rollout.max_tokens``; every engine must hold as many.
            prefix_cache: ``weights.prefix_cache``.
            restores_weights: whether the launcher's engines do; see `EngineSpec.restores_weights`.
            group: name of the engines in metrics, as in ``sampler.groups``; empty: they have none.
        """
        self.sampler = RoutedSampler(FIRST if config.max_running == "auto" else config.max_running)
        self.mirror = FleetMirror(self.sampler)
        """The engines for other processes that sample with them."""
        self._sglang_router = (
            SGLangRouter(self.sampler, config, logs / "router.log", vocabulary, knows_ages=prefix_cache == "keep")
            if config.has_router_program
            else None
        )
        self._router: EngineRouter = self._sglang_router or self.sampler
        self._config = config
        self._launcher = launcher
        self.vocabulary = vocabulary
        self._max_tokens = max_tokens
        self._prefix_cache = prefix_cache
        self._restores_weights = restores_weights
        self.group = group
        self._owner = secrets.token_hex(4)
        """Sent with weights: another run that uses an engine has another one."""
        self._retired: list[SGLangClient] = []
        """Clients of engines before their restart: requests may still use them."""
        self._engines: list[Engine] = []
        self._health = HealthMonitor(self._engines, self._router, config, self._restart)
        self._concurrency = ConcurrencyMonitor(self._live_by_name, self.sampler.limit_engine)
        self._reported_counts = Counter[str]()
        """Prompt and cached tokens at the last call of `metrics`."""
        self._reported_discarded = 0
        """Tokens of generations that began again, at the last call of `metrics`."""

    async def start(self) -> None:
        """Start all engines concurrently, or attach to running ones, and start to monitor them.

        Raises:
            EngineError: an engine does not start; the message has its last log lines.
            ConfigError: no healthy engine answers at an address of ``sampler.url``, or one holds less than ``max_tokens``, or
                has other tokens for images than the policy's.
        """
        if self._sglang_router is not None:
            await self._sglang_router.start()
        if self._config.urls:
            for number, url in enumerate(self._config.urls):
                self._engines.append(await self._attach(number, url))
        else:
            launches = [asyncio.create_task(self._launch(number)) for number in range(training_engines(self._config))]
            try:
                await asyncio.wait(launches)
            finally:
                for task in launches:
                    task.cancel()
                results = await asyncio.gather(*launches, return_exceptions=True)
                self._engines += [engine for engine in results if isinstance(engine, Engine)]  # `aclose` stops these
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        await asyncio.gather(*(self._check_length(engine) for engine in self._engines))
        await asyncio.gather(*(self._check_images(engine) for engine in self._engines))
        for engine in self._engines:
            self._router.add(engine.name, engine.client)
        self._health.start()
        if self._config.max_running == "auto":
            await self._concurrency.start()

    async def aclose(self) -> None:
        """Stop all engines that were started, and close all connections."""
        await self._concurrency.aclose()
        await self._health.aclose()
        if self._sglang_router is not None:
            await self._sglang_router.aclose()
        await asyncio.gather(*(self._end(engine) for engine in self._engines))
        for client in (*self._retired, *(engine.client for engine in self._engines)):
            await client.aclose()

    @property
    def live(self) -> tuple[SGLangClient, ...]:
        """Clients of the engines that serve requests now, without those that are being restarted."""
        return tuple(engine.client for engine in self._engines if engine.live)

    def _live_by_name(self) -> dict[str, SGLangClient]:
        return {engine.name: engine.client for engine in self._engines if engine.live}

    @property
    def has_requests(self) -> bool:
        """Whether generations of any process are in progress at the engines, or wait for them."""
        return self.sampler.has_requests or self.mirror.has_requests

    def on_demand(self, call: Callable[[], None]) -> None:
        """Call a function when `has_requests` may have changed."""
        self.sampler.on_demand = self.mirror.on_demand = call

    def restart_in(self, context: AbstractAsyncContextManager[None]) -> None:
        """Restart engines only inside of a context."""
        self._health.launch_in = context

    def set_weight_sync(
        self, sync_weights: SyncWeights, *, launch_in: AbstractAsyncContextManager[None] | None = None
    ) -> None:
        """Sync the weights of restarted engines with ``sync_weights`` before they serve requests.

        A restart and its weight sync run inside of ``launch_in``.
        """
        self._health.sync_weights = sync_weights
        if launch_in is not None:
            self.restart_in(launch_in)

    async def check_now(self) -> None:
        """Check all engines now, so that `live` has no engine that has just failed."""
        await self._health.check_now()

    async def wait_ended(self) -> None:
        """Wait until the processes of engines that are not live have ended, and their memory is free.

        Raises:
            EngineError: no engine is left.
        """
        await self._health.wait_ended()

    async def flush(self) -> None:
        """Drop the prefix caches of all live engines."""
        await asyncio.gather(*(client.flush() for client in self.live))

    def check(self) -> None:
        """Raise `EngineError` if no engine is left, with the last log lines of the last one, or if the router has failed."""
        self._health.check()
        if self._sglang_router is not None:
            self._sglang_router.check()

    def metrics(self) -> dict[str, float]:
        """Return the number of engine restarts, also by group, and metrics of prefix cache and speculative decoding since the
        last call.
        """
        counts = self.sampler.counts - self._reported_counts
        self._reported_counts = self.sampler.counts.copy()
        metrics = {"rollout/engine_restarts": float(self._health.restarts)} | self._concurrency.metrics()
        for group in {engine.group: None for engine in self._engines if engine.group}:
            engines = [engine for engine in self._engines if engine.group == group]
            metrics[f"engines/{group}/live"] = float(sum(engine.live for engine in engines))
            metrics[f"engines/{group}/restarts"] = float(sum(engine.restarts for engine in engines))
        if counts["prompt"]:
            metrics["rollout/cache_hit"] = counts["cached"] / counts["prompt"]
        if counts["verified"]:
            metrics["rollout/accept_length"] = counts["speculated"] / counts["verified"]
        clients: list[GenerationClient] = [*self._retired, *(engine.client for engine in self._engines)]
        clients += [] if self._sglang_router is None else [self._sglang_router]
        if discarded := self.mirror.discarded_tokens + sum(client.discarded_tokens for client in clients):
            previously_discarded, self._reported_discarded = self._reported_discarded, discarded
            metrics["async/discarded_tokens"] = float(discarded - previously_discarded)
        return metrics | age_metrics([client.prefix_ages for client in clients if client.prefix_ages is not None])

    # Engines

    async def _attach(self, number: int, url: str) -> Engine:
        client = self._client(number, url)
        if not await client.healthy():
            await client.aclose()
            raise ConfigError(f"sampler.url={url}: no healthy engine answers there")
        if self._prefix_cache != "drop":  # what an earlier run has computed, with other weights
            await client.flush()
        return Engine(f"engine-{number}", client, None)

    async def _launch(self, number: int) -> Engine:
        process = await launch(partial(self._launcher.launch, number), f"engine-{number}")
        group, _ = engine_group(self._config, number)
        serves = self._config.groups[group].serves if group else ""
        client = self._client(number, process.url)
        return Engine(f"engine-{number}", client, process, group=group or self.group, serves=serves)

    async def _end(self, engine: Engine) -> None:
        """Stop an engine that was started. One that is kept is left to the next run, if it is whole and runs nothing."""
        if engine.process is None:
            return
        is_reusable = self._config.keep_minutes is not None and engine.live and engine.client.ready
        if is_reusable:
            try:
                async with asyncio.timeout(_IDLE_S):
                    await engine.client.flush()
            except (EngineError, TimeoutError):
                is_reusable = False
        await asyncio.to_thread(engine.process.release if is_reusable else engine.process.stop)

    async def _restart(self, engine: Engine) -> None:
        number = self._engines.index(engine)
        process = await launch(partial(self._launcher.launch, number), engine.name)
        self._retired.append(engine.client)
        engine.process, engine.client = process, self._client(number, process.url)

    def _client(self, number: int, url: str) -> SGLangClient:
        timeout_s, vocabulary = self._config.request_timeout_s, self.vocabulary
        client = SGLangClient(
            url,
            timeout_s=timeout_s,
            vocabulary=vocabulary,
            routed=self._sglang_router,
            number=number,
            prefix_cache=self._prefix_cache,
            mirror=self.mirror,
            restores_weights=self._restores_weights,
        )
        client.updates.owner = self._owner
        return client

    async def _check_length(self, engine: Engine) -> None:
        """Raise `ConfigError` if an episode within ``rollout.max_tokens`` may be too long for an engine."""
        most = await engine.client.max_tokens()
        if self._max_tokens > most:
            raise ConfigError(
                f"rollout.max_tokens={self._max_tokens}, but {engine.name} at {engine.client.url} takes prompts and answers of "
                f"at most {most} tokens: lower rollout.max_tokens, or raise the engine's context "
                "(sampler.sglang.context_length) or the memory for its KV cache (sampler.sglang.mem_fraction_static)"
            )

    async def _check_images(self, engine: Engine) -> None:
        """Raise `ConfigError` if an engine takes no images, or expands them to other tokens than the policy's processor."""
        prompt = None if self.vocabulary is None else self.vocabulary.image_prompt
        if prompt is None:
            return
        params, name = SamplingParams(max_new_tokens=1), f"images-{engine.name}"
        try:
            await engine.client.generate(prompt, params, session_id=name, request_id=name)
        except EngineLostError:
            raise
        except SamplerError as error:
            raise ConfigError(
                f"{engine.name} at {engine.client.url} takes no prompt with images, as those of model.path have: {error}"
            ) from error
