"""The server's dialects, its memory of calls, and what it refuses."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import msgpack
import orjson
import pytest
from agentrl_tools.search.bm25 import bm25_corpora
from agentrl_tools.search.corpora import open_corpora
from agentrl_tools.search.retriever import Corpora
from agentrl_tools.search.server import Retrieval, SearchQueue, listen, make_app, serve

from agentrl.core.errors import ConfigError, PortInUseError

ROWS = [{"id": str(i), "contents": f'"Place {i}"\nPlace {i} is a town.'} for i in range(5)]


def post(*bodies: Any, content_type: str = "application/json", accept: str = "*/*", **kwargs: Any) -> list[Any]:
    """Send each body to one server and return the replies."""
    queue = SearchQueue(bm25_corpora({"train": ROWS}), **kwargs)

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(make_app(queue, topk=2))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            headers = {"content-type": content_type, "accept": accept}
            return [await http.post("/retrieve", content=body, headers=headers) for body in bodies]

    return asyncio.run(send())


def packed(body: Any) -> bytes:
    return orjson.dumps(body)


def test_three_dialects_one_answer() -> None:
    many, one = post(
        packed({"queries": ["place 3"], "topk": 3, "return_scores": True}),
        packed({"query": "place 3", "topk": 3, "return_scores": True}),
    )
    body = msgpack.packb({"queries": ["place 3"], "topk": 3, "return_scores": True})
    (binary,) = post(body, content_type="application/msgpack")
    (both,) = post(body, content_type="application/x-msgpack", accept="application/msgpack")
    assert many.json() == one.json() == binary.json() == msgpack.unpackb(both.content)
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
        (packed({"query": "x", "call_ids": ["a", "b"]}), "one id for each of the 1 queries"),
    ],
)
def test_a_request_at_fault_is_told_why(body: bytes, fault: str) -> None:
    (reply,) = post(body)
    assert reply.status_code == 400
    assert fault in reply.json()["error"]


def test_broken_msgpack_is_told() -> None:
    (reply,) = post(b"\xc1", content_type="application/msgpack")
    assert reply.status_code == 400


def test_a_retry_gets_the_first_answer_and_searches_nothing() -> None:
    queue = SearchQueue(bm25_corpora({"train": ROWS}), remembered=2)

    async def ask(*calls: tuple[str, str]) -> list[Any]:
        names, queries = [call[0] for call in calls], [call[1] for call in calls]
        return await queue.retrieve(Retrieval(queries, 1, "train", True, names))

    async def run() -> None:
        first = await ask(("a", "place 1"), ("b", "place 2"))
        assert queue.searched == 2
        assert await ask(("b", "place 2"), ("a", "place 1")) == first[::-1]
        assert queue.searched == 2
        (other,) = await ask(("a", "place 4"))
        assert other[0]["document"]["id"] == "4"
        # Only two are remembered: the oldest call is searched anew.
        assert await ask(("a", "place 1")) == first[:1]
        assert queue.searched == 4
        # More calls in one request than are remembered all get their answers.
        assert len(await ask(*((str(i), f"place {i}") for i in range(5)))) == 5

    asyncio.run(run())


def test_a_port_in_use_names_option_and_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortInUseError, match=r"--port \(tools\.search\.port\)"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen on 192\\.0\\.2\\.1"):
        listen("192.0.2.1", 0)


def test_serve_refuses_what_it_cannot_serve() -> None:
    def never() -> Corpora:
        raise AssertionError("options are checked first")

    with pytest.raises(ConfigError, match="--topk is 0"):
        serve(never, host="127.0.0.1", port=0, topk=0)
    with pytest.raises(ConfigError, match="there is no file"):
        serve(lambda: open_corpora({"default": Path("nowhere.jsonl")}), host="127.0.0.1", port=0, topk=3)
    with pytest.raises(ConfigError, match=r"--index .* is for --retriever e5"):
        open_corpora({"default": Path("nowhere.jsonl")}, indexes={"default": Path("x.index")})
