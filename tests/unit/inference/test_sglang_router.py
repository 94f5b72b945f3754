"""The gateway before its router runs: the gate of several engines, aborts at all of them, and what a lost request is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import EngineLostError, MissingError, SamplerError
from agentrl.core.types import Prompt, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet import sglang_router_process as gateway_process
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.inference.fleet.sglang_router import Gateway


class FakeEngine:
    """Its gate, and the ids of requests that it was told to stop."""

    def __init__(self, number: int) -> None:
        self.url = f"http://127.0.0.1:{number}"
        self.shut = asyncio.Event()
        self.shut.set()
        self.unfit = False
        self.deaf = False
        self.stopped: list[str] = []

    @property
    def closed(self) -> bool:
        return self.unfit or not self.shut.is_set()

    async def opened(self) -> None:
        await self.shut.wait()
        if self.unfit:
            raise SamplerError("only a part of an update")

    async def stop(self, rid: str) -> None:
        if self.deaf:
            raise SamplerError("it does not answer")
        self.stopped.append(rid)


class FakeRouter(httpx.AsyncBaseTransport):
    """Answers each generation with ``reply`` once ``free`` is set, and keeps the headers that came."""

    def __init__(self, reply: httpx.Response) -> None:
        self.reply = reply
        self.free = asyncio.Event()
        self.keys: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers["x-smg-routing-key"])
        await self.free.wait()
        return self.reply


def sampled(finish: str = "length") -> httpx.Response:
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": [[-0.5, 7, None]], "weight_version": "3"}
    return httpx.Response(200, json={"output_ids": [7], "meta_info": meta})


def made(router: FakeRouter | None = None) -> tuple[Gateway, list[Any]]:
    config = load_config(None, ["sampler.router=sglang"]).sampler
    gateway = Gateway(RoutedSampler(), config, Path("router.log"))
    if router is not None:
        client = httpx.AsyncClient(transport=router)
        gateway._transport._clients = gateway._transport._free = [client]
    engines: list[Any] = [FakeEngine(1), FakeEngine(2)]
    for engine in engines:
        gateway.add(engine.url, engine)
    return gateway, engines


def asked(gateway: Gateway) -> asyncio.Future[Any]:
    params = SamplingParams(max_new_tokens=1)
    return asyncio.ensure_future(gateway.generate(Prompt((1, 2)), params, session_id="s/1", request_id="r"))


def run(play: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await play

    asyncio.run(bounded())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_any_engine_that_is_closed_holds_all_requests_back_until_it_opens_or_leaves() -> None:
    async def play() -> None:
        router = FakeRouter(sampled())
        router.free.set()
        gateway, [first, second] = made(router)
        first.shut.clear()
        second.shut.clear()
        request = asked(gateway)
        await turns()
        first.shut.set()
        await turns()
        assert not router.keys
        gateway.remove(second.url)
        generation = await request
        assert (generation.token_ids, generation.versions) == ((7,), ((0, 3),))
        assert router.keys == ["s/1"]

    run(play())


def test_an_engine_with_unfit_weights_refuses_all() -> None:
    async def play() -> None:
        gateway, [_, second] = made()
        second.unfit = True
        with pytest.raises(SamplerError, match="only a part"):
            await asked(gateway)

    run(play())


def test_an_abort_goes_to_all_and_wants_one_that_listens() -> None:
    async def play() -> None:
        router = FakeRouter(sampled("abort"))
        gateway, [first, second] = made(router)
        first.deaf = second.deaf = True
        request = asked(gateway)
        await turns()
        with pytest.raises(SamplerError, match="does not answer"):
            await gateway.abort("r")
        second.deaf = False
        stopping = asyncio.ensure_future(gateway.abort("r"))
        await turns()
        assert second.stopped == ["r:0"]
        assert not stopping.done()
        router.free.set()
        await stopping
        assert (await request).token_ids == (7,)

    run(play())


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("call_upstream_request_error", 500, EngineLostError),
        ("read_response_body_failed", 500, EngineLostError),
        ("no_available_workers", 503, EngineLostError),
        ("call_upstream_timeout", 504, SamplerError),
        (None, 500, SamplerError),
    ],
)
def test_what_the_router_says_of_a_lost_engine_is_not_what_an_engine_says(
    code: str | None, status: int, kind: type[SamplerError]
) -> None:
    async def play() -> None:
        headers = {} if code is None else {"X-SMG-Error-Code": code}
        body = {"error": {"code": code, "message": "what happened"}}
        router = FakeRouter(httpx.Response(status, json=body, headers=headers))
        router.free.set()
        gateway, _ = made(router)
        with pytest.raises(SamplerError, match="what happened") as raised:
            await asked(gateway)
        assert type(raised.value) is kind

    run(play())


def test_a_lost_request_makes_all_engines_suspects() -> None:
    async def play() -> None:
        sampler = RoutedSampler()
        gateway = Gateway(sampler, load_config(None, ["sampler.router=sglang"]).sampler, Path("router.log"))
        suspects: list[str] = []
        gateway.on_lost = suspects.append
        for name in ("engine-0", "engine-1"):
            gateway.add(name, SGLangClient(f"http://127.0.0.1/{name}"))
        sampler.on_lost("sglang-router")
        assert suspects == ["engine-0", "engine-1"]

    run(play())


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingError, match=r"pip install 'agentrl\[router\]'.*sampler\.router=builtin"):
        gateway_process.require_router()
