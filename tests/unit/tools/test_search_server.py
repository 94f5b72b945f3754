"""Search as a hosted tool, and the dialects of ``/retrieve``."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest
from agentrl_tools.search import SearchOptions, SearchService, SearchTool
from agentrl_tools.search.bm25 import bm25_corpora
from agentrl_tools.search.corpora import open_corpora
from deadlines import wait_until
from mcp import Client

from agentrl.config.toolserver import ServerConfig
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import ConfigError, ToolFailure
from agentrl.core.types import ToolCall, ToolStatus
from agentrl.testing import check_tool
from agentrl.toolserver import request_limits
from agentrl.toolserver.launch import launch_tool
from agentrl.toolserver.options import make_server_config
from agentrl.toolserver.server.app import make_app
from agentrl.toolserver.server.sessions import Sessions
from agentrl.toolserver.service import make_tools

ROWS = [{"id": str(i), "contents": f'"Place {i}"\nPlace {i} is a town.'} for i in range(300)]


def search_tool(rows: int = 5, topk: int = 2) -> SearchTool:
    return SearchTool(SearchOptions(topk=topk), bm25_corpora({"train": ROWS[:rows]}))


@asynccontextmanager
async def client_of(tool: SearchTool) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(Sessions(None, [tool], ServerConfig())))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http


def post(*bodies: Any, content_type: str = "application/json", accept: str = "*/*") -> list[Any]:
    """Send each body to one server's ``/retrieve`` and return the replies."""

    async def send() -> list[httpx.Response]:
        headers = {"content-type": content_type, "accept": accept}
        async with client_of(search_tool()) as http:
            return [await http.post("/retrieve", content=body, headers=headers) for body in bodies]

    return asyncio.run(send())


def packed(body: Any) -> bytes:
    return orjson.dumps(body)


def test_a_whole_number_with_a_point_is_a_number_of_documents_and_one_call_fails_alone() -> None:
    """What JSON Schema takes for an integer, in a batch with the calls of other episodes."""
    topks = [1, 2.0, 3, 2.5, 0, 1e0]
    calls = [
        {"call_id": str(number), "tool": "search", "arguments": {"query": "place 3", "topk": topk}}
        for number, topk in enumerate(topks)
    ]

    async def send() -> list[dict[str, Any]]:
        async with client_of(search_tool()) as http:
            return list((await http.post("/calls", json={"calls": calls})).json()["results"])

    results = asyncio.run(send())
    assert [result["status"] for result in results] == ["ok", "ok", "ok", "invalid", "invalid", "ok"]
    assert [len(results[number]["data"]) for number in (0, 1, 2, 5)] == [1, 2, 3, 1]


def test_three_dialects_one_answer() -> None:
    many, single_reply = post(
        packed({"queries": ["place 3"], "topk": 3, "return_scores": True}),
        packed({"query": "place 3", "topk": 3, "return_scores": True}),
    )
    body = msgpack.packb({"queries": ["place 3"], "topk": 3, "return_scores": True})
    (binary,) = post(body, content_type="application/msgpack")
    (both,) = post(body, content_type="application/x-msgpack", accept="application/msgpack")
    assert many.json() == single_reply.json() == binary.json() == msgpack.unpackb(both.content)
    (hits,) = many.json()["result"]
    assert len(hits) == 3
    assert hits[0]["document"] == ROWS[3]
    assert hits[0]["score"] > hits[1]["score"]


def test_without_scores_documents_are_bare_and_topk_is_the_servers() -> None:
    (reply,) = post(packed({"queries": ["place 3", "nowhere"]}))
    assert reply.json() == {"result": [[ROWS[3], ROWS[0]], []]}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"{", "unexpected end"),
        (b"[]", "found list"),
        (packed({}), "'queries' must be a list of strings"),
        (packed({"queries": [1]}), "'queries' must be a list of strings"),
        (packed({"query": "x", "topk": 0}), "from 1 to 100, it is 0"),
        (packed({"query": "x", "topk": True}), "it is True"),
        (packed({"query": "x", "corpus": "trian"}), "Did you mean 'train'"),
        (packed({"query": "x", "corpus": 1}), "'corpus' must be a string"),
        (packed({"query": "x" * 8193}), "the query has 8193 characters, 8192 are allowed"),
        (packed({"queries": ["x", "y" * 9000]}), "the query has 9000 characters"),
        (packed({"queries": ["x"] * 4097}), "a request may have 4096 queries, it has 4097"),
        (b'{"query": ' + b"[" * 5000 + b"]" * 5000 + b"}", "depth"),
    ],
)
def test_a_request_at_fault_gets_the_reason(body: bytes, fault: str) -> None:
    (reply,) = post(body)
    assert reply.status_code == 400
    assert fault in reply.json()["error"]


@pytest.mark.parametrize("body", [b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff"], ids=["unused", "deep", "array"])
def test_broken_msgpack_is_refused(body: bytes) -> None:
    (reply,) = post(body, content_type="application/msgpack")
    assert reply.status_code == 400


def test_its_own_route_has_the_token_and_the_limits_of_every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "BODY_BYTES", 1000)

    async def send() -> None:
        sessions = Sessions(None, [search_tool()], ServerConfig())
        transport = httpx.ASGITransport(make_app(sessions, token="secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            for path in ("/retrieve", "/calls", "/tools", "/sessions"):
                assert (await http.post(path, content=packed({"query": "place 3"}))).status_code == 401
            http.headers["authorization"] = "Bearer secret"
            assert (await http.post("/retrieve", content=packed({"query": "place 3"}))).status_code == 200
            assert (await http.post("/retrieve", content=packed({"query": "x" * 1000}))).status_code == 413

    asyncio.run(send())


def test_many_queries_of_a_request_let_others_in() -> None:
    class Counting(SearchTool):
        batches: tuple[int, ...] = ()

        def _search(self, queries: Any, topk: int, corpus: str | None) -> Any:
            self.batches += (len(queries),)
            return super()._search(queries, topk, corpus)

    tool = Counting(SearchOptions(), bm25_corpora({"train": ROWS}))
    queries = [f"place {number % 300}" for number in range(600)]
    result = asyncio.run(tool.search(queries, 1, None))
    assert [hits[0]["document"] for hits in result] == [ROWS[number % 300] for number in range(600)]
    assert tool.batches == (256, 256, 88)


def test_a_batch_of_calls_is_searched_by_topk_and_corpus() -> None:
    tool = search_tool(topk=1)
    requests = [
        {"query": "place 3"},
        {"query": "place 4", "topk": 2},
        {"query": "x", "corpus": "trian"},
        {"query": "nowhere"},
        {"query": "place 3 " * 2000},
    ]
    results = tool.answer([ToolCall(str(number), "search", request) for number, request in enumerate(requests)])
    assert [result.call_id for result in results] == list("01234")
    assert [[hit["document"] for hit in result.data or ()] for result in results] == [
        [ROWS[3]],
        [ROWS[4], ROWS[0]],
        [],
        [],
        [],
    ]
    assert (results[4].status, "16000 characters, 8192 are allowed" in results[4].content) == (ToolStatus.INVALID, True)
    assert results[0].content == ROWS[3]["contents"]
    assert results[2].status is ToolStatus.INVALID
    assert "Did you mean 'train'" in results[2].content
    assert results[3].content == "No document matches the query."


def test_sessions_call_it_as_any_tool_and_queries_share_batches() -> None:
    class Counting(SearchTool):
        batches: tuple[int, ...] = ()

        def answer(self, calls: Any) -> Any:
            self.batches += (len(calls),)
            return super().answer(calls)

    async def scenario() -> None:
        tool = Counting(SearchOptions(), bm25_corpora({"train": ROWS}))
        sessions = Sessions(None, [tool], ServerConfig())
        opened = [await sessions.open(str(number)) for number in range(64)]
        calls = [ToolCall("c", "search", {"query": f"place {number}", "topk": 1}) for number in range(64)]
        answers = await asyncio.gather(*(session.call(call) for session, call in zip(opened, calls, strict=True)))
        assert [answer.result.content for answer in answers] == [row["contents"] for row in ROWS[:64]]
        assert sum(tool.batches) == 64
        assert max(tool.batches) > 32
        assert tool.health() == {"corpora": {"train": 300}, "searched": 64}
        await sessions.stop()
        await tool.close()

    asyncio.run(scenario())


def config_of(*words: str) -> Any:
    """Return the configuration that ``agentrl tools serve search`` makes of its arguments."""
    configs: list[Any] = []
    parser = argparse.ArgumentParser()
    service = SearchService()
    service.add_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentrl_tools.search.service.serve", lambda config, **where: configs.append(config))
        service.serve(parser.parse_args(words))
    (config,) = configs
    return config


def test_flags_are_the_tools_options(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools: {search: {topk: 7, retriever: e5}}\nserver: {max_sessions: 4}\n")
    config = config_of(f"--config={file}", "--corpus=a=x.jsonl", "--corpus=b=y.jsonl", "--index=a=z", "--topk=5")
    assert config.tools == {
        "search": {
            "topk": 5,
            "retriever": "e5",
            "corpus": {"a": Path("x.jsonl"), "b": Path("y.jsonl")},
            "index": {"a": Path("z")},
        }
    }
    assert config.server.max_sessions == 4
    (tool,) = make_tools(config)
    assert isinstance(tool, SearchTool)
    assert tool.topk == 5
    settings = make_server_config(None, ["search.corpus=x.jsonl", "search.topk=2"], ["search"])
    assert settings.tools == {"search": {"corpus": "x.jsonl", "topk": 2}}


def test_a_server_refuses_what_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match=r"tools\.search\.topk=0"):
        make_tools(config_of("--corpus=x.jsonl", "--topk=0"))
    with pytest.raises(ConfigError, match=r"--index .* is for --retriever e5"):
        make_tools(config_of("--corpus=x.jsonl", "--index=x.index"))
    with pytest.raises(ConfigError, match=r"--index .* is for --retriever e5"):
        open_corpora({"default": Path("nowhere.jsonl")}, indexes={"default": Path("x.index")})

    async def start(*words: str) -> None:
        (tool,) = make_tools(config_of(*words))
        await tool.start()

    with pytest.raises(ConfigError, match=r"--corpus \(tools\.search\.corpus\): no corpus given"):
        asyncio.run(start())
    with pytest.raises(ConfigError, match=r"there is no file nowhere\.jsonl"):
        asyncio.run(start("--corpus=nowhere.jsonl"))


def corpus_file(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in ROWS))
    return path


@pytest.mark.usefixtures("forked_starts")
def test_the_contract_and_a_real_server_that_is_killed_in_mid_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with launch_tool("search", [f"--corpus=train={corpus_file(tmp_path)}"], log=log, timeout_s=60) as server:
        check_tool(SearchService(), {"query": "place 3"}, url=server.url, options={"client": {"retries": 0}})

        async def scenario() -> None:
            client = SearchService().client(server.url, {"client": {"retries": 0}})
            calls = [
                ToolCall(f"c{i}", "search", {"query": f"place {i}", "topk": 1, "corpus": "train"}) for i in range(256)
            ]
            results = await asyncio.gather(*(client.call(call, episode_id=call.id) for call in calls))
            for number, result in enumerate(results):
                assert (result.call_id, result.status) == (f"c{number}", ToolStatus.OK)
                assert [hit["document"] for hit in result.data] == [ROWS[number]]
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
                health = (await http.get("/health")).json()
                assert (health["corpora"], health["sessions"]) == ({"train": 300}, 0)
                actual = await http.post("/retrieve", json={"query": "place 7", "topk": 1})
                assert actual.json() == {"result": [[ROWS[7]]]}
            async with Client(f"{server.url}/mcp") as mcp:
                answer = await mcp.call_tool("search", {"query": "place 3", "topk": 1})
                assert answer.content[0].text == ROWS[3]["contents"]  # type: ignore[union-attr]
            os.kill(server.pid, signal.SIGKILL)
            with pytest.raises(ToolFailure, match=r"no tool server answers .*tools\.search\.url"):
                await client.call(calls[0], episode_id="e")
            await client.aclose()

        asyncio.run(scenario())
        wait_until(lambda: not server.alive(), 10)


def test_a_server_that_builds_an_index_ends_when_it_is_stopped(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "import agentrl_tools.search.tool as tool\n"
        "def slow(*files, **options):\n"
        "    print('building', flush=True)\n"
        "    time.sleep(120)\n"
        "tool.open_corpora = slow\n"
        "from agentrl.cli.main import main\n"
        f"main(['tools', 'serve', 'search', '--port=0', '--corpus={corpus_file(tmp_path)}'])\n"
    )
    with ChildProcess.start([sys.executable, "-c", code], log=tmp_path / "log", name="search") as child:

        def is_building() -> bool:
            child.check()
            return "building" in child.log_tail()

        wait_until(is_building, 60)
        os.kill(child.pid, signal.SIGTERM)
        wait_until(lambda: not child.alive(), 20)
        assert child.exit_code() == 0, child.log_tail()
