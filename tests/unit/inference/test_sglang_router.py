"""`SGLangRouter` without the router's process: closed engines, aborts at all engines, and lost requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from agentrl.config.load import load_config
from agentrl.core.errors import EngineError, EngineLostError, MissingError, SamplerError
from agentrl.core.types import Prompt, SamplingParams
from agentrl.inference.client.http import EngineHttp
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.fleet.router import RoutedSampler
from agentrl.inference.fleet.sglang_router import SGLangRouter, require_router

VOCABULARY = Vocabulary(100, lambda ids: "")


class FakeEngine:
    """An engine that accepts requests or not; records the ids of aborted requests."""

    def __init__(self, number: int) -> None:
        self.url = f"http://127.0.0.1:{number}"
        self.shut = asyncio.Event()
        self.shut.set()
        self.unfit = False
        self.deaf = False
        self.stopped: list[str] = []
        self.updates = SimpleNamespace(sent_owner="")

    @property
    def ready(self) -> bool:
        return not self.unfit and self.shut.is_set()

    async def wait_ready(self) -> None:
        await self.shut.wait()
        if self.unfit:
            raise SamplerError("only a part of an update")

    async def stop(self, rid: str) -> None:
        if self.deaf:
            raise SamplerError("it does not answer")
        self.stopped.append(rid)


class FakeRouter:
    """Ends each generation with ``finish`` once ``free`` is set, and records the routing keys."""

    url = "http://router"

    def __init__(self, finish: str = "length") -> None:
        self.finish = finish
        self.free = asyncio.Event()
        self.keys: list[str] = []

    async def generate(self, body: dict[str, Any], *, key: str) -> bytes:
        self.keys.append(key)
        await self.free.wait()
        return orjson.dumps(sampled(body, self.finish))


def sampled(body: dict[str, Any], finish: str) -> dict[str, Any]:
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": finish},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": 1,
        "output_token_logprobs": [[-0.5, 7, None]],
        "weight_version": "3",
    }
    return {"output_ids": [7], "meta_info": meta}


def made(router: Any = None) -> tuple[SGLangRouter, list[Any]]:
    config = load_config(None, ["sampler.router=sglang"]).sampler
    sglang_router = SGLangRouter(RoutedSampler(), config, Path("router.log"), VOCABULARY)
    if router is not None:
        sglang_router._http = router
    engines: list[Any] = [FakeEngine(1), FakeEngine(2)]
    for engine in engines:
        sglang_router.add(engine.url, engine)
    return sglang_router, engines


def request_one(sglang_router: SGLangRouter) -> asyncio.Future[Any]:
    params = SamplingParams(max_new_tokens=1)
    return asyncio.ensure_future(sglang_router.generate(Prompt((1, 2)), params, session_id="s/1", request_id="r"))


def run(play: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(10):
            await play

    asyncio.run(bounded())


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_closed_engine_holds_all_requests_back_until_it_opens_or_is_removed() -> None:
    async def play() -> None:
        router = FakeRouter()
        router.free.set()
        sglang_router, [first, second] = made(router)
        first.shut.clear()
        second.shut.clear()
        request = request_one(sglang_router)
        await turns()
        first.shut.set()
        await turns()
        assert not router.keys
        sglang_router.remove(second.url)
        generation = await request
        assert (generation.token_ids, generation.versions) == ((7,), ((0, 3),))
        assert router.keys == ["s/1"]

    run(play())


def test_a_reply_with_weights_of_another_run_ends_the_run() -> None:
    async def play() -> None:
        router = FakeRouter()
        router.free.set()
        sglang_router, [first, _] = made(router)
        first.updates.sent_owner = "1f"
        with pytest.raises(EngineError, match="has weights that this run did not send"):
            await request_one(sglang_router)

    run(play())


def test_an_engine_with_unfit_weights_refuses_all() -> None:
    async def play() -> None:
        sglang_router, [_, second] = made()
        second.unfit = True
        with pytest.raises(SamplerError, match="only a part"):
            await request_one(sglang_router)

    run(play())


def test_an_abort_goes_to_all_engines_and_needs_one_that_answers() -> None:
    async def play() -> None:
        router = FakeRouter("abort")
        sglang_router, [first, second] = made(router)
        first.deaf = second.deaf = True
        request = request_one(sglang_router)
        await turns()
        with pytest.raises(SamplerError, match="does not answer"):
            await sglang_router.abort("r")
        second.deaf = False
        stopping = asyncio.ensure_future(sglang_router.abort("r"))
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
def test_router_errors_about_lost_engines_differ_from_engine_errors(
    code: str | None, status: int, kind: type[SamplerError]
) -> None:
    async def play() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            headers = {} if code is None else {"X-SMG-Error-Code": code}
            body = {"error": {"code": code, "message": "what happened"}}
            return web.json_response(body, status=status, headers=headers)

        async with RawTestServer(answer) as server:
            http = EngineHttp(str(server.make_url("")), 5.0)
            sglang_router, _ = made(http)
            with pytest.raises(SamplerError, match="what happened") as raised:
                await request_one(sglang_router)
            await http.aclose()
        assert type(raised.value) is kind

    run(play())


def test_a_lost_request_is_reported_for_all_engines() -> None:
    async def play() -> None:
        sampler = RoutedSampler()
        sglang_router = SGLangRouter(
            sampler, load_config(None, ["sampler.router=sglang"]).sampler, Path("router.log"), VOCABULARY
        )
        suspects: list[str] = []
        sglang_router.on_lost = suspects.append
        for name in ("engine-0", "engine-1"):
            sglang_router.add(name, SGLangClient(f"http://127.0.0.1/{name}"))
        sampler.on_lost("sglang-router")
        assert suspects == ["engine-0", "engine-1"]

    run(play())


def test_without_the_package_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    with pytest.raises(
        MissingError, match=r"router=sglang \(builtin needs none\).*pip install 'agentrl-framework\[router\]'"
    ):
        require_router()
