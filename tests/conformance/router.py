"""An engine whose generations come through ``sglang-router``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conformance.engine import Engine

from agentrl.sampler.client import SGLangClient
from agentrl.sampler.flights import Flights
from agentrl.sampler.gateway_process import Workers, launch_router
from agentrl.sampler.transport import Transport


@dataclass
class RoutedEngine(Engine):
    router: str

    def client(self) -> SGLangClient:
        gate = Gate()
        gate.client = SGLangClient(self.url, timeout_s=60, flights=Flights(Transport(self.router, 60), gate))
        return gate.client


class Gate:
    client: SGLangClient

    @property
    def closed(self) -> bool:
        return self.client.closed

    async def opened(self) -> None:
        await self.client.opened()


@contextmanager
def routed(engine: Engine, log: Path) -> Iterator[RoutedEngine]:
    """Start a router before an engine, and end it."""
    router = launch_router(log, request_timeout_s=60, start_timeout_s=30)
    try:
        asyncio.run(introduced(router.url, engine.url))
        yield RoutedEngine(**vars(engine), router=router.url)
        router.check()
    finally:
        router.stop()


async def introduced(router: str, engine: str) -> None:
    transport = Transport(router, 10)
    workers = Workers(transport)
    await workers.add(engine)
    async with asyncio.timeout(20):
        while engine not in await workers.listed():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
    await transport.aclose()
