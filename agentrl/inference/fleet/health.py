"""Health monitoring of the engines: engines that die or hang are removed, restarted, and get the current weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from agentrl.config.sampler import SamplerConfig
from agentrl.core.background import first_ended
from agentrl.core.errors import AgentrlError, EngineError, EngineLostError
from agentrl.inference.base import EngineControl
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.router import EngineRouter
from agentrl.inference.launch.launcher import RunningEngine

_log = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds between two checks of whether a process runs, each a system call."""

SyncWeights = Callable[[EngineControl], Awaitable[int]]
"""Syncs the current weights to an engine that is not sampling, and returns their version."""


@dataclass(slots=True, eq=False)
class Engine:
    """State of one engine."""

    name: str
    """``engine-0``, ``engine-1`` and so on."""
    client: SGLangClient
    process: RunningEngine | None
    """None if the engine was attached by URL rather than started."""
    group: str = ""
    """Its group in ``sampler.groups``; empty: none."""
    serves: str = ""
    """``prefill`` or ``decode``, if it does one of the two."""
    restarts: int = 0
    """Number of restarts."""
    live: bool = True
    """It serves requests with the current weights."""
    lost: bool = False
    """It has no restarts left; if attached, it has not answered for ``sampler.stall_timeout_s``."""
    unreachable: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request could not reach it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is not live and its process has ended."""

    def exit_error(self) -> str | None:
        """Return the error with which its process ended, with the end of its log; None while it runs."""
        try:
            if self.process is not None:
                self.process.check()
        except EngineError as error:
            return str(error)
        return None


class HealthMonitor:
    """Monitors the engines and restarts those that fail, until it is closed."""

    def __init__(
        self,
        engines: Sequence[Engine],
        router: EngineRouter,
        config: SamplerConfig,
        relaunch: Callable[[Engine], Awaitable[None]],
    ) -> None:
        """Create a monitor; `start` starts it.

        Args:
            engines: the engines, all live.
            router: engines are added to and removed from it.
            config: check intervals, timeouts and the number of restarts.
            relaunch: starts a new, healthy process of an engine and sets its client; raises `AgentrlError`.
        """
        self.sync_weights: SyncWeights | None = None
        """If None, restarted engines keep their initial weights."""
        self.launch_in: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        """Context of each restart, weight sync included."""
        self.restarts = 0
        """Number of restarts of all engines."""
        self._engines = engines
        self._router = router
        self._config = config
        self._relaunch = relaunch
        self._error: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to monitor the engines."""
        self._router.on_lost = self._on_lost
        for engine in self._engines:
            task = asyncio.create_task(self._supervise(engine), name=f"health of {engine.name}")
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def aclose(self) -> None:
        """Stop monitoring. An engine that is just being started is stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise if the run cannot continue.

        Raises:
            EngineError: no engine is left; the message has the last log lines of the last one.
        """
        if self._error is not None:
            raise self._error

    async def check_now(self) -> None:
        """Check all engines now, and wait until those that have failed are removed."""
        for engine in self._engines:
            engine.unreachable.set()
        await asyncio.sleep(2 * _POLL_S)

    async def wait_ended(self) -> None:
        """Wait until the processes of engines that are not live have ended."""
        for engine in self._engines:
            if engine.process is not None and not engine.live:
                await engine.ended.wait()
        self.check()

    def _remove(self, engine: Engine) -> None:
        engine.live = False
        engine.ended.clear()
        self._router.remove(engine.name)

    def _on_lost(self, name: str) -> None:
        for engine in self._engines:
            if engine.name == name:
                engine.unreachable.set()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """An error in the monitor itself also ends the run."""
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for engine in self._engines:
            engine.ended.set()  # no restart will follow
        self._router.fail(str(error))

    # One engine

    async def _supervise(self, engine: Engine) -> None:
        while not engine.lost or engine.process is None:
            why = await self._wait_failure(engine)
            self._remove(engine)
            _log.warning("%s: %s", engine.name, why)
            await (self._wait_recovery(engine, why) if engine.process is None else self._restart(engine, why))

    async def _wait_failure(self, engine: Engine) -> str:
        checks = [self._until_hung(engine)]
        checks.append(self._until_unreachable(engine) if engine.process is None else self._until_exit(engine))
        async with first_ended(*checks) as tasks:
            reason: str = next(task for task in tasks if task.done()).result()
            return reason

    async def _until_exit(self, engine: Engine) -> str:
        while (why := engine.exit_error()) is None:  # noqa: ASYNC110 - the end of a process sends no event
            await asyncio.sleep(_POLL_S)
        return why

    async def _until_hung(self, engine: Engine) -> str:
        every = self._config.health_interval_s
        clock = asyncio.get_running_loop().time
        answered = clock()
        while True:
            _, limit = self._silence_limit(engine)
            await asyncio.sleep(min(every, limit / 2))
            if await self._answers(engine, answered + limit - clock()):
                answered = clock()
                continue
            key, limit = self._silence_limit(engine)  # it may have begun to receive weights
            if clock() >= answered + limit:
                # This process itself may have been busy for so long: check once more.
                if not await self._answers(engine, min(every, limit)):
                    tail = await asyncio.to_thread(_tail, engine)
                    return f"it has not answered at {engine.client.url} for sampler.{key}={limit:g} s{tail}"
                answered = clock()

    def _silence_limit(self, engine: Engine) -> tuple[str, float]:
        """Return the key and the seconds for which an engine may be silent now."""
        if engine.client.updates.in_progress:
            return "update_timeout_s", self._config.update_timeout_s
        return "stall_timeout_s", self._config.stall_timeout_s

    async def _until_unreachable(self, engine: Engine) -> str:
        """An attached engine has no process to check: a failed request may be the first sign that it has died."""
        while True:
            await engine.unreachable.wait()
            engine.unreachable.clear()
            if not await self._answers(engine, self._config.stall_timeout_s):
                return f"it cannot be reached at {engine.client.url}"
            if await _has_lost_weights(engine.client):
                return f"it was restarted at {engine.client.url}, and has its first weights"

    async def _answers(self, engine: Engine, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await engine.client.healthy()
        except TimeoutError:
            return False

    async def _restart(self, engine: Engine, why: str) -> None:
        most = self._config.max_restarts
        while engine.restarts < most:
            engine.restarts += 1
            self.restarts += 1
            await self._kill(engine)
            try:
                async with self.launch_in:
                    engine.ended.clear()
                    await self._relaunch(engine)
                    await self._add(engine)
            except AgentrlError as error:
                why = str(error)
                _log.warning("%s, restart %d of %d: %s", engine.name, engine.restarts, most, why)
            else:
                _log.warning("%s was restarted (%d of %d)", engine.name, engine.restarts, most)
                return
        await self._kill(engine)
        engine.lost = True
        self._fail_if_none_left(
            f"{engine.name} was restarted {engine.restarts} times (sampler.max_restarts={most}): {why}"
        )

    async def _kill(self, engine: Engine) -> None:
        """Kill the process and its group: a hanging process would ignore SIGTERM."""
        assert engine.process is not None
        await asyncio.to_thread(engine.process.kill)
        engine.ended.set()

    async def _wait_recovery(self, engine: Engine, why: str) -> None:
        begun = asyncio.get_running_loop().time()
        while True:
            with contextlib.suppress(AgentrlError):  # it failed again
                if await self._answers(engine, self._config.stall_timeout_s):
                    await self._add(engine)
                    _log.warning("%s answers again", engine.name)
                    return
            if not engine.lost and asyncio.get_running_loop().time() - begun >= self._config.stall_timeout_s:
                engine.lost = True
                self._fail_if_none_left(f"{engine.name}: {why}")
            await asyncio.sleep(self._config.health_interval_s)

    async def _add(self, engine: Engine) -> None:
        """Sync the current weights to an engine, then add it to the router.

        Raises:
            EngineError: the weight sync fails, or the engine has another version after it.
        """
        if self.sync_weights is not None:
            expected = await self._while_healthy(engine, self.sync_weights(engine.client))
            version = await engine.client.version()
            if version != expected:
                raise EngineError(f"{engine.name} samples with version {version}, but {expected} was synced")
        engine.unreachable.clear()
        engine.live, engine.lost = True, False
        self._router.add(engine.name, engine.client)

    async def _while_healthy(self, engine: Engine, syncing: Awaitable[int]) -> int:
        """Return the result of ``syncing``; `EngineError` as soon as the engine dies or hangs meanwhile."""
        async with first_ended(syncing, self._wait_failure(engine)) as (sync, failure):
            if not sync.done() and engine.process is not None:
                # Not cancelled: the learner may be in the middle of a weight sync. Killing the engine ends its requests.
                await self._kill(engine)
            try:
                version: int = await sync
            except EngineError as error:
                raise EngineError(failure.result() if failure.done() else str(error)) from error
            return version

    def _fail_if_none_left(self, why: str) -> None:
        for serves in {engine.serves for engine in self._engines}:
            if all(engine.lost for engine in self._engines if engine.serves == serves):
                task = f" for {serves}" if serves else ""
                self._fail(EngineError(f"no engine is left{task}. {why}"))


async def _has_lost_weights(client: SGLangClient) -> bool:
    """Return whether an engine was restarted, and has its first weights instead of those that it has received."""
    try:
        await client.version()
    except EngineError as error:
        return isinstance(error.__cause__, EngineLostError)
    return False


def _tail(engine: Engine) -> str:
    if engine.process is None:
        return ""
    return f". The end of its log {engine.process.log}:\n{engine.process.log_tail()}"
