"""Measurements of sandboxes: cold starts and warm calls, alone and through server and client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.extras import require
from agentrl.core.tool import ToolClient
from agentrl.core.types import ToolCall
from agentrl.sandbox.base import Job, SandboxBackend

Call = Callable[[str], Awaitable[str]]
"""Runs Python code and returns what it printed."""
OPENERS = 8
"""Sessions opened concurrently."""


@dataclass(frozen=True, slots=True)
class SandboxTimes:
    """Times of warm calls in concurrent sessions; each call prints a unique number."""

    sessions: int
    open_s: float
    """Time until all sessions have answered their first call, with ``OPENERS`` started at a time."""
    cold_ms: float
    """Start and first call of one session while nothing else runs."""
    p50_ms: float
    p99_ms: float
    calls_per_s: float
    wrong: int
    """Replies of other calls."""


Opener = Callable[[int], Awaitable[Call]]
"""Opens session number n and returns its function to run code."""


async def measure(opener: Opener, sessions: int, calls: int) -> SandboxTimes:
    """Open sessions and make about ``calls`` calls, each session one after the other."""
    began = time.perf_counter()
    first = await opener(0)
    await first("print(0)")
    cold_s = time.perf_counter() - began
    gate = asyncio.Semaphore(OPENERS)

    async def open_session(number: int) -> Call:
        async with gate:
            call = await opener(number)
            await call("print(0)")
            return call

    began = time.perf_counter()
    callers = [first, *await asyncio.gather(*(open_session(number) for number in range(1, sessions)))]
    open_s = time.perf_counter() - began
    seconds: list[float] = []
    wrong = 0

    async def work(number: int, call: Call) -> None:
        nonlocal wrong
        for turn in range(max(calls // sessions, 4)):
            expected = f"{number} {turn}"
            started = time.perf_counter()
            reply = await call(f"print({number}, {turn})")
            seconds.append(time.perf_counter() - started)
            wrong += reply.strip() != expected

    began = time.perf_counter()
    await asyncio.gather(*(work(number, call) for number, call in enumerate(callers)))
    elapsed = time.perf_counter() - began
    cuts = quantiles(seconds, n=100)
    return SandboxTimes(sessions, open_s, cold_s * 1e3, cuts[49] * 1e3, cuts[98] * 1e3, len(seconds) / elapsed, wrong)


@asynccontextmanager
async def backend_opener(backend: SandboxBackend) -> AsyncIterator[Opener]:
    """Yield an opener of sandboxes of a backend, without a server."""
    async with backend, AsyncExitStack() as exits:

        async def opener(number: int) -> Call:
            sandbox = await exits.enter_async_context(await backend.open(f"bench-{number}"))

            async def call(code: str) -> str:
                return (await sandbox.run(Job("bench", code=code))).stdout

            return call

        yield opener


@asynccontextmanager
async def client_opener(client: ToolClient, tool: str = "python") -> AsyncIterator[Opener]:
    """Yield an opener of sessions of a running tool server."""
    opened: list[str] = []

    async def opener(number: int) -> Call:
        episode, count = f"bench-{number}", 0
        opened.append(episode)

        async def call(code: str) -> str:
            nonlocal count
            count += 1
            result = await client.call(ToolCall(str(count), tool, {"code": code}), episode_id=episode)
            return result.content

        return call

    try:
        yield opener
    finally:
        await asyncio.gather(*(client.close_session(episode) for episode in opened))


@asynccontextmanager
async def docker_exec_opener(config: SandboxConfig) -> AsyncIterator[Opener]:
    """Yield the baseline: plain containers, and a ``docker exec`` of Python for each call."""
    require("docker", "docker exec")
    import docker

    client = docker.DockerClient(base_url=config.docker_url) if config.docker_url else docker.from_env()
    containers: list[Any] = []

    async def opener(number: int) -> Call:
        container = await asyncio.to_thread(
            client.containers.run, config.image, ["sleep", "100000"], detach=True, network_mode="none"
        )
        containers.append(container)

        async def call(code: str) -> str:
            done = await asyncio.to_thread(container.exec_run, ["python3", "-c", code])
            return str(done.output.decode())

        return call

    try:
        yield opener
    finally:
        for container in containers:
            await asyncio.to_thread(container.remove, force=True)
        client.close()


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Limit this thread, and the processes that it starts, to ``count`` cores."""
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(affinity)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)


def measure_backend(
    make: Callable[[], SandboxBackend], sessions: Sequence[int], calls: int, cores: int
) -> Iterator[SandboxTimes]:
    """Measure a backend alone, this process and its sandboxes on ``cores`` cores.

    A container is started by its daemon, so that the bound does not hold for what runs in docker.
    """
    for number in sessions:

        async def once(number: int = number) -> SandboxTimes:
            async with backend_opener(make()) as opener:
                return await measure(opener, number, calls)

        with on_cores(cores):
            yield asyncio.run(once())
