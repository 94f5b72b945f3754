"""Watches the engines of a run: takes out one that dies or hangs, and brings it back with the current weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import AgentrlError, EngineError
from agentrl.inference.base import EngineControl
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.router import EngineRouter
from agentrl.inference.launch.launcher import RunningEngine

_log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Seconds between two looks at whether a process lives: a system call."""

Resend = Callable[[EngineControl], Awaitable[int]]
"""Brings the current weights into one engine that is not sampling, and returns their version."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine of a run."""

    name: str
    """``engine-0`` and so on."""
    client: SGLangClient
    process: RunningEngine | None
    """None: it is somebody else's."""
    restarts: int = 0
    """How often it was started again."""
    live: bool = True
    """It samples, with the current weights."""
    gone: bool = False
    """It will not come back, or, of an engine that is not ours, has not for ``sampler.stall_timeout_s``."""
    unreachable: asyncio.Event = field(default_factory=asyncio.Event)
    """A request could not reach it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """It is not live, and its process has ended."""

    def death(self) -> str | None:
        """Return how its process ended, in the words of its log; None while it runs."""
        try:
            if self.process is not None:
                self.process.check()
        except EngineError as error:
            return str(error)
        return None


class Monitor:
    """Looks after the engines until it is closed."""

    def __init__(
        self,
        engines: Sequence[Engine],
        router: EngineRouter,
        config: SamplerConfig,
        launch: Callable[[Engine], Awaitable[None]],
    ) -> None:
        """Watch nothing yet.

        Args:
            engines: all live.
            router: is told which of them take part.
            config: how often to look, and how often to start an engine again.
            launch: gives an engine a new process, which is healthy, and a client for it; raises `AgentrlError`.

        """
        self.resend: Resend | None = None
        """Without it engines sample with the weights that they start with."""
        self.launch_in: AbstractAsyncContextManager[None] = contextlib.nullcontext()
        """What starting an engine again, its weights included, is inside of."""
        self.restarts = 0
        """Of all engines."""
        self._engines = engines
        self._router = router
        self._config = config
        self._launch = launch
        self._error: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch."""
        self._router.on_lost = self._on_lost
        for engine in self._engines:
            task = asyncio.create_task(self._watch(engine), name=f"watch {engine.name}")
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    async def aclose(self) -> None:
        """Watch no longer. An engine that is just being started is stopped."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what ends the run.

        Raises:
            EngineError: no engine is left, with the last log lines of the one that went last.

        """
        if self._error is not None:
            raise self._error

    async def look(self) -> None:
        """Wait until an engine that has just failed is out."""
        for engine in self._engines:
            engine.unreachable.set()
        await asyncio.sleep(2 * _LOOK_S)

    async def ended(self) -> None:
        """Wait until the engines that are not live have no process, and so no memory, any more."""
        for engine in self._engines:
            if engine.process is not None and not engine.live:
                await engine.ended.wait()
        self.check()

    def _take_out(self, engine: Engine) -> None:
        engine.live = False
        engine.ended.clear()
        self._router.remove(engine.name)

    def _on_lost(self, name: str) -> None:
        for engine in self._engines:
            if engine.name == name:
                engine.unreachable.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fault of the monitor itself ends the run too."""
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        self._error = self._error or error
        for engine in self._engines:
            engine.ended.set()  # nobody is to wait for what will not come
        self._router.fail(str(error))

    # One engine

    async def _watch(self, engine: Engine) -> None:
        while not engine.gone or engine.process is None:
            why = await self._trouble(engine)
            self._take_out(engine)
            _log.warning("%s: %s", engine.name, why)
            await (self._await_return(engine, why) if engine.process is None else self._start_again(engine, why))

    async def _trouble(self, engine: Engine) -> str:
        """Wait until the engine fails, and return how."""
        looks = [self._until_hung(engine)]
        looks.append(self._until_unreachable(engine) if engine.process is None else self._until_dead(engine))
        tasks = [asyncio.ensure_future(look) for look in looks]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_dead(self, engine: Engine) -> str:
        while (why := engine.death()) is None:  # noqa: ASYNC110 - nothing tells of a process's end
            await asyncio.sleep(_LOOK_S)
        return why

    async def _until_hung(self, engine: Engine) -> str:
        limit, every = self._config.stall_timeout_s, self._config.health_interval_s
        now = asyncio.get_running_loop().time
        answered = now()
        while True:
            await asyncio.sleep(min(every, limit / 2))
            if await self._answers(engine, answered + limit - now()):
                answered = now()
            elif now() >= answered + limit:
                # It may be this process that was busy for so long: one more chance.
                if not await self._answers(engine, min(every, limit)):
                    tail = await asyncio.to_thread(_tail, engine)
                    return f"it has not answered at {engine.client.url} for sampler.stall_timeout_s={limit:g} s{tail}"
                answered = now()

    async def _until_unreachable(self, engine: Engine) -> str:
        """Of an engine that is not ours nobody tells us that it has died; a request may be the first to see it."""
        while True:
            await engine.unreachable.wait()
            engine.unreachable.clear()
            if not await self._answers(engine, self._config.stall_timeout_s):
                return f"it cannot be reached at {engine.client.url}"

    async def _answers(self, engine: Engine, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await engine.client.healthy()
        except TimeoutError:
            return False

    async def _start_again(self, engine: Engine, why: str) -> None:
        most = self._config.max_restarts
        while engine.restarts < most:
            engine.restarts += 1
            self.restarts += 1
            await self._kill(engine)
            try:
                async with self.launch_in:
                    engine.ended.clear()
                    await self._launch(engine)
                    await self._admit(engine)
            except AgentrlError as error:
                why = str(error)
                _log.warning("%s, started again (%d of %d): %s", engine.name, engine.restarts, most, why)
            else:
                _log.warning("%s was started again (%d of %d)", engine.name, engine.restarts, most)
                return
        await self._kill(engine)
        engine.gone = True
        self._check_left(
            f"{engine.name} was started again {engine.restarts} times (sampler.max_restarts={most}): {why}"
        )

    async def _kill(self, engine: Engine) -> None:
        """End the process and its group. What hangs would not end politely."""
        assert engine.process is not None
        await asyncio.to_thread(engine.process.kill)
        engine.ended.set()

    async def _await_return(self, engine: Engine, why: str) -> None:
        begun = asyncio.get_running_loop().time()
        while True:
            with contextlib.suppress(AgentrlError):  # it went again meanwhile
                if await self._answers(engine, self._config.stall_timeout_s):
                    await self._admit(engine)
                    _log.warning("%s is back", engine.name)
                    return
            if not engine.gone and asyncio.get_running_loop().time() - begun >= self._config.stall_timeout_s:
                engine.gone = True
                self._check_left(f"{engine.name}: {why}")
            await asyncio.sleep(self._config.health_interval_s)

    async def _admit(self, engine: Engine) -> None:
        """Bring the current weights into an engine, then let it sample.

        Raises:
            EngineError: it does not take them, or samples with others.

        """
        if self.resend is not None:
            wanted = await self._while_well(engine, self.resend(engine.client))
            found = await engine.client.version()
            if found != wanted:
                raise EngineError(f"{engine.name} samples with version {found}, but {wanted} was sent")
        engine.unreachable.clear()
        engine.live, engine.gone = True, False
        self._router.add(engine.name, engine.client)

    async def _while_well(self, engine: Engine, sending: Awaitable[int]) -> int:
        """Return what ``sending`` does, which fails at once where our engine dies or hangs meanwhile."""
        sent = asyncio.ensure_future(sending)
        trouble = asyncio.ensure_future(self._trouble(engine))
        try:
            await asyncio.wait({sent, trouble}, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done() and engine.process is not None:
                # Not cancelled: the learner may be amid handing out its weights. The requests to this engine end now.
                await self._kill(engine)
            return await sent
        except EngineError as error:
            raise EngineError(trouble.result() if trouble.done() else str(error)) from error
        finally:
            for task in (sent, trouble):
                task.cancel()
            await asyncio.gather(sent, trouble, return_exceptions=True)

    def _check_left(self, why: str) -> None:
        if all(engine.gone for engine in self._engines):
            self._fail(EngineError(f"no engine is left. {why}"))


def _tail(engine: Engine) -> str:
    if engine.process is None:
        return ""
    return f". The end of its log {engine.process.log}:\n{engine.process.log_tail()}"
