"""What an engine does for generations that come through ``sglang-router``: the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conformance.control import Control
from conformance.engine import Engine
from conformance.sampling import Sampling
from deadlines import until

from agentrl.core.types import Generation
from agentrl.inference.client.generation import GenerationClient
from agentrl.inference.client.http import EngineHttp
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.sglang_router import launch_router, list_workers


@dataclass
class RoutedEngine(Engine):
    router: str

    def client(self) -> SGLangClient:
        return RoutedClient(self.url, self.router)


class RoutedClient(SGLangClient):
    """Client of an engine whose generations go through a router."""

    def __init__(self, url: str, router: str) -> None:
        self._router = RouterClient(EngineHttp(router, 60), self)
        super().__init__(url, timeout_s=60, routed=self._router)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        return await self._router.generate(*args, **kwargs)

    async def abort(self, request_id: str) -> None:
        await self._router.abort(request_id)

    async def aclose(self) -> None:
        await self._router.aclose()
        await super().aclose()


class RouterClient(GenerationClient):
    """Client of a router with one engine."""

    def __init__(self, pool: EngineHttp, engine: SGLangClient) -> None:
        super().__init__(pool)
        self._engine = engine

    @property
    def ready(self) -> bool:
        return self._engine.ready

    async def wait_ready(self) -> None:
        await self._engine.wait_ready()

    async def abort(self, request_id: str) -> None:
        await self.abort_at(request_id, self._engine.stop)

    async def aclose(self) -> None:
        await self._http.aclose()


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
    pool = EngineHttp(router, 10)
    async with pool.request("POST", "/workers", {"url": engine}):
        pass

    async def listed() -> bool:
        return engine in await list_workers(pool)

    await until(listed)
    await pool.aclose()


class ThroughRouter:
    """Those of the tests of every engine that show whether something is lost on the way; see `Sampling`."""

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedEngine]:
        pytest.importorskip("sglang_router", reason="sglang-router is not installed")
        with routed(engine, tmp_path_factory.mktemp("router") / "router.log") as through:
            yield through

    test_temperature = Sampling.test_ids_in_ids_out_with_logprobs_at_the_temperature
    test_top = Sampling.test_top_k_and_top_p_restrict_without_renormalising
    test_seed = Sampling.test_a_request_with_a_seed_repeats_where_the_engine_says_so
    test_stop_token = Sampling.test_a_stop_token_ends_the_turn_and_stays
    test_ignore_eos = Sampling.test_no_token_ends_a_turn_with_ignore_eos
    test_prefix = Sampling.test_later_turns_find_their_prefix_cached
    test_abort = Control.test_an_aborted_request_keeps_its_tokens
    test_hang_up = Control.test_a_caller_that_goes_away_frees_its_place
    test_refusal = Control.test_bad_requests_are_refused_in_the_engines_words
    test_many = Control.test_300_concurrent_requests

    def test_pause(self, engine: Engine) -> None:
        Control().test_paused_requests_end_as_if_nothing_had_been(engine, "abort")
