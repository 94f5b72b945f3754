"""The client against servers that work, fail, refuse and die."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from agentrl_tools.search import SearchService
from agentrl_tools.search.bm25 import bm25_corpora
from agentrl_tools.search.server import SearchQueue, listen, make_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl import ToolCall, ToolStatus
from agentrl.core.errors import ToolFailure
from agentrl.core.tool import ToolClient
from agentrl.testing import check_tool
from agentrl.toolserver.launch import launch_tool

ROWS = [{"id": str(i), "contents": f'"Place {i}"\nPlace {i} is a town.'} for i in range(300)]


@asynccontextmanager
async def serving(app: Starlette) -> AsyncIterator[str]:
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def calling(url: str, **options: Any) -> AsyncIterator[ToolClient]:
    client = SearchService().client(url, options)
    try:
        yield client
    finally:
        await client.aclose()


class Scripted:
    """A server that answers each request as told, and remembers the requests."""

    def __init__(self, *answers: Callable[[dict[str, Any]], Response]) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        async def retrieve(request: Request) -> Response:
            self.bodies.append(await request.json())
            return self.answers[min(len(self.bodies), len(self.answers)) - 1](self.bodies[-1])

        return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def good(body: dict[str, Any]) -> Response:
    hits = [[{"document": {"id": query, "contents": query}, "score": 1.0}] for query in body["queries"]]
    return JSONResponse({"result": hits})


def broken(body: dict[str, Any]) -> Response:
    return Response("out of memory", status_code=503)


def call(index: int, **arguments: Any) -> ToolCall:
    return ToolCall(f"c{index}", "search", {"query": f"place {index}", **arguments})


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(bounded())


def test_concurrent_calls_get_their_own_answers_in_few_requests() -> None:
    async def scenario() -> None:
        queue = SearchQueue(bm25_corpora({"train": ROWS}))
        async with serving(make_app(queue)) as url, calling(url) as client:
            results = await asyncio.gather(
                *(client.call(call(i, topk=1, corpus="train"), episode_id=f"e{i}") for i in range(256))
            )
        for index, result in enumerate(results):
            assert (result.call_id, result.status) == (f"c{index}", ToolStatus.OK)
            assert [hit["document"] for hit in result.data] == [ROWS[index]]
            assert result.content == ROWS[index]["contents"]

    run(scenario)


def test_calls_are_batched_by_topk_and_corpus_and_at_most_64() -> None:
    async def scenario() -> None:
        server = Scripted(good)
        async with serving(server.app()) as url, calling(f"{url}/retrieve") as client:
            calls = [call(i) for i in range(70)] + [call(i, topk=9, corpus="x") for i in range(3)]
            results = await asyncio.gather(*(client.call(item, episode_id="e") for item in calls))
        assert [result.data[0]["document"]["id"] for result in results] == [item.arguments["query"] for item in calls]
        sizes = sorted((len(body["queries"]), body["topk"], body.get("corpus")) for body in server.bodies)
        assert sizes == [(3, 9, "x"), (6, 3, None), (64, 3, None)]
        assert {body["return_scores"] for body in server.bodies} == {True}

    run(scenario)


def test_a_retry_sends_the_same_call_ids() -> None:
    async def scenario() -> None:
        server = Scripted(broken, broken, good)
        async with serving(server.app()) as url, calling(url) as client:
            assert (await client.call(call(1), episode_id="e7")).status is ToolStatus.OK
        assert [body["call_ids"] for body in server.bodies] == [["e7/c1"]] * 3
        assert server.bodies[0] == server.bodies[2]

    run(scenario)


def test_after_all_retries_the_failure_is_typed_and_tells_all() -> None:
    async def scenario() -> None:
        server = Scripted(broken)
        async with serving(server.app()) as url, calling(url, retries=1) as client:
            results = await asyncio.gather(
                *(client.call(call(i), episode_id="e") for i in range(2)), return_exceptions=True
            )
            for result in results:
                assert isinstance(result, ToolFailure)
                assert "tools.search.url) failed 2 times: status 503: out of memory" in str(result)
        assert len(server.bodies) == 2

    run(scenario)


def test_a_request_the_server_refuses_is_a_result_and_is_not_repeated() -> None:
    async def scenario() -> None:
        queue = SearchQueue(bm25_corpora({"train": ROWS}))
        async with serving(make_app(queue)) as url, calling(url) as client:
            result = await client.call(call(1, corpus="trian"), episode_id="e")
        assert result.status is ToolStatus.INVALID
        assert "Did you mean 'train'" in result.content
        server = Scripted(lambda body: Response("go away", status_code=403))
        async with serving(server.app()) as url, calling(url) as client:
            result = await client.call(call(1), episode_id="e")
        assert (result.status, result.content) == (ToolStatus.INVALID, "search: status 403: go away")
        assert len(server.bodies) == 1

    run(scenario)


@pytest.mark.parametrize(
    "reply", [b"hello", b"{}", b'{"result": []}', b'{"result": [[{"id": 1}]]}', b'{"result": [3]}']
)
def test_a_server_that_is_no_retrieval_server(reply: bytes) -> None:
    async def scenario() -> None:
        async with serving(Scripted(lambda body: Response(reply)).app()) as url, calling(url) as client:
            with pytest.raises(ToolFailure, match="is no retrieval server: to 1 queries it answered"):
                await client.call(call(1), episode_id="e")

    run(scenario)


def test_a_server_that_does_not_answer_in_time() -> None:
    async def scenario() -> None:
        async def hang(request: Request) -> Response:
            await asyncio.sleep(1)
            return Response()

        app = Starlette(routes=[Route("/retrieve", hang, methods=["POST"])])
        async with serving(app) as url, calling(url, retries=0, timeout_s=0.05) as client:
            with pytest.raises(ToolFailure, match="failed 1 times: ReadTimeout"):
                await client.call(call(1), episode_id="e")

    run(scenario)


def test_closing_the_client_ends_calls_under_way_as_failures() -> None:
    async def scenario() -> None:
        client = SearchService().client("http://127.0.0.1:9", {})
        under_way = asyncio.create_task(client.call(call(1), episode_id="e"))
        await asyncio.sleep(0)
        await client.aclose()
        with pytest.raises(ToolFailure, match="was closed"):
            await under_way

    run(scenario)


def test_a_caller_that_gives_up_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        async with serving(Scripted(good).app()) as url, calling(url) as client:
            calls = [asyncio.create_task(client.call(call(i), episode_id="e")) for i in range(3)]
            await asyncio.sleep(0)
            calls[1].cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)
        assert [done[0].data[0]["document"]["id"], done[2].data[0]["document"]["id"]] == ["place 0", "place 2"]

    run(scenario)


def test_the_contract_and_a_real_server_that_is_killed_in_mid_run(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(row) for row in ROWS))
    with launch_tool("search", [f"--corpus=train={corpus}"], log=tmp_path / "log", timeout_s=60) as server:
        check_tool(SearchService(), {"query": "place 3"}, url=server.url, options={"retries": 0})

        async def scenario() -> None:
            async with calling(server.url, retries=1) as client:
                assert (await client.call(call(1), episode_id="e")).status is ToolStatus.OK
                os.kill(server.pid, signal.SIGKILL)
                with pytest.raises(ToolFailure, match="failed 2 times: ConnectError"):
                    await client.call(call(2), episode_id="e")
            assert not server.alive()

        run(scenario)
