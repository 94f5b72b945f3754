"""The routes of a tool server, as a client sees them."""

import asyncio
import json
from collections.abc import Sequence

import httpx
import pytest
from deadlines import until
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.testing import FakeSandboxBackend
from agentrl.toolserver import request_limits
from agentrl.toolserver.hosted_tool import StatelessTool, ToolSession
from agentrl.toolserver.server.app import make_app
from tests.unit.toolserver.fake_hosts import (
    Clock,
    FakeTool,
    Gate,
    app_client,
    echo,
    in_loop,
    in_sandbox,
    make_sessions,
    served,
)
from tests.unit.toolserver.many_sessions import play_at_once

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


def http(url: str, timeout_s: float = 20.0) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=httpx.Timeout(20.0, read=timeout_s))


async def opened(client: httpx.AsyncClient, episode_id: str | None = None) -> str:
    reply = await client.post("/sessions", json={} if episode_id is None else {"episode_id": episode_id})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["session_id"])


async def call(
    client: httpx.AsyncClient, session: str, call_id: str, tool: str = "fake", **arguments: object
) -> httpx.Response:
    body = {"call_id": call_id, "tool": tool, "arguments": arguments}
    return await client.post(f"/sessions/{session}/call", json=body)


@in_loop
async def test_a_session_from_its_opening_to_its_end() -> None:
    sessions = make_sessions(FakeTool(echo, schema=SCHEMA))
    async with app_client(make_app(sessions)) as client:
        reply = await client.post("/sessions", json={"episode_id": "e"})
        session = reply.json()["session_id"]
        assert reply.json() == {"session_id": session, "server": sessions.instance}
        assert await opened(client, "e") == session
        first = await call(client, session, "c", n=1)
        assert first.json() == {"call_id": "c", "status": "ok", "content": "c {'n': 1}", "data": {"session": session}}
        assert (await call(client, session, "c", n=1)).content == first.content
        assert (await call(client, session, "c", n=2)).status_code == 409
        assert (await call(client, session, "d", "nope")).json()["status"] == "invalid"
        assert (await call(client, session, "f", n="x")).json()["status"] == "invalid"
        assert (await client.get("/health")).json() == {"status": "ok", "sessions": 1, "server": sessions.instance}
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert (await client.delete(f"/sessions/{session}")).status_code == 204
        assert (await call(client, session, "g")).status_code == 410
        assert (await client.delete("/sessions/unknown")).status_code == 404
        assert (await call(client, "unknown", "g")).status_code == 404
        assert (await client.post("/sessions")).status_code == 200, "without a body"


@in_loop
async def test_tools_are_told_as_the_policy_reads_them() -> None:
    async with app_client(make_app(make_sessions(FakeTool(echo, "a", SCHEMA), FakeTool(echo, "b")))) as client:
        schemas = (await client.get("/tools")).json()["tools"]
    assert schemas[0] == {"name": "a", "description": "Does as the test says.", "parameters": SCHEMA}
    assert [tool["name"] for tool in schemas] == ["a", "b"]


BAD = [
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    b'{"call_id": "c"}',
    b'{"call_id": "c", "tool": "fake"}',
    b'{"call_id": "c", "tool": "fake", "arguments": []}',
    b'{"call_id": "c", "tool": "fake", "arguments": null}',
    b'{"call_id": "c", "tool": 1, "arguments": {}}',
    b'{"call_id": 1, "tool": "fake", "arguments": {}}',
    b'{"call_id": "", "tool": "fake", "arguments": {}}',
    b'{"call_id": "' + b"c" * 257 + b'", "tool": "fake", "arguments": {}}',
    b'{"call_id": "c", "tool": "fake", "arguments": {"n": NaN}}',
    b'{"call_id": "c", "tool": "fake", "arguments": {"n": -Infinity}}',
    b'{"call_id": "c", "tool": "fake", "arguments": {}, "argument": 1}',
    b'{"call_id": "\\ud800", "tool": "fake", "arguments": {}}',
]


@pytest.mark.parametrize("body", BAD, ids=lambda body: body[:60].decode(errors="replace"))
@in_loop
async def test_bodies_that_are_no_call(body: bytes) -> None:
    tool = FakeTool(echo)
    async with app_client(make_app(make_sessions(tool))) as client:
        reply = await client.post(f"/sessions/{await opened(client)}/call", content=body)
        assert reply.status_code == 400
        assert set(reply.json()) == {"error"}
    assert not tool.calls


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"episode_id": 1}', b'{"episode_id": ""}', b'{"episode": "x"}'])
@in_loop
async def test_bodies_that_open_no_session(body: bytes) -> None:
    async with app_client(make_app(make_sessions())) as client:
        assert (await client.post("/sessions", content=body)).status_code == 400


@in_loop
async def test_a_body_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "BODY_BYTES", 1000)
    sessions = make_sessions(FakeTool(echo))
    async with served(make_app(sessions)) as url, http(url) as client:
        session = await opened(client)
        reply = await call(client, session, "c", text="x" * 1000)
        assert (reply.status_code, set(reply.json())) == (413, {"error"})
        assert (await call(client, session, "c", text="x" * 100)).status_code == 200


@in_loop
async def test_paths_and_methods_that_are_not_there() -> None:
    async with app_client(make_app(make_sessions())) as client:
        for reply in (await client.get("/nope"), await client.get("/sessions"), await client.put("/sessions/x/call")):
            assert reply.status_code in (404, 405)
            assert set(reply.json()) == {"error"}


@in_loop
async def test_numbers_beyond_64_bits_arrive_whole() -> None:
    async with app_client(make_app(make_sessions(FakeTool(echo)))) as client:
        body = json.dumps({"call_id": "c", "tool": "fake", "arguments": {"n": 10**30}})
        reply = await client.post(f"/sessions/{await opened(client)}/call", content=body)
        assert reply.json()["content"] == f"c {{'n': {10**30}}}"


@in_loop
async def test_failures_of_tools_are_results_and_not_errors_of_http() -> None:
    async def fails(session: ToolSession, call: ToolCall) -> ToolResult:
        raise SandboxFailure("the runner is gone")

    async with app_client(make_app(make_sessions(FakeTool(fails)))) as client:
        reply = await call(client, await opened(client), "c")
        assert reply.status_code == 200
        assert reply.json() == {
            "call_id": "c",
            "status": "sandbox_failure",
            "content": "the runner is gone",
            "data": None,
        }


class Upper(StatelessTool):
    """Answers in capitals; ``batches`` are the sizes of its batches."""

    def __init__(self) -> None:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        super().__init__(Tool("upper", "Answers in capitals.", schema), max_batch=8)
        self.batches: list[int] = []

    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        self.batches.append(len(calls))
        await asyncio.sleep(0.01)
        if any(call.arguments["text"] == "break" for call in calls):
            raise ToolFailure("the index is gone")
        return [ToolResult(call.id, ToolStatus.OK, call.arguments["text"].upper()) for call in calls]


@in_loop
async def test_stateless_calls_need_no_session_and_share_batches_with_those_of_sessions() -> None:
    tool = Upper()
    sessions = make_sessions(tool, FakeTool(echo))
    async with app_client(make_app(sessions)) as client:
        session = await opened(client)
        texts = [f"t{number}" for number in range(12)]
        body = {"calls": [{"call_id": "same", "tool": "upper", "arguments": {"text": text}} for text in texts]}
        body["calls"].append({"call_id": "bad", "tool": "upper", "arguments": {"text": 1}})
        body["calls"].append({"call_id": "odd", "tool": "nope", "arguments": {}})
        reply, of_session = await asyncio.gather(
            client.post("/calls", content=json.dumps(body)), call(client, session, "1", "upper", text="session")
        )
        assert reply.json()["server"] == sessions.instance
        results = reply.json()["results"]
        assert [result["content"] for result in results[:12]] == [text.upper() for text in texts]
        assert [(result["call_id"], result["status"]) for result in results[12:]] == [
            ("bad", "invalid"),
            ("odd", "invalid"),
        ]
        assert of_session.json()["content"] == "SESSION"
        assert sum(tool.batches) == 13
        assert max(tool.batches) > 1
        broken = {"calls": [{"call_id": "b", "tool": "upper", "arguments": {"text": "break"}}]}
        (result,) = (await client.post("/calls", json=broken)).json()["results"]
        assert (result["status"], result["content"]) == ("unavailable", "the index is gone")
        counted = sessions.metrics.registry.get_sample_value
        assert counted("agentrl_tool_calls_total", {"tool": "upper", "status": "ok"}) == 13
        with_state = {"calls": [{"call_id": "c", "tool": "fake", "arguments": {}}]}
        refused = await client.post("/calls", json=with_state)
        assert (refused.status_code, "open a session" in refused.json()["error"]) == (400, True)
        half = {"calls": [{"call_id": "half", "tool": "upper", "arguments": {"text": "\ud800"}}]}
        for bad in (half, {}, {"calls": {}}, {"calls": [1]}, {"calls": body["calls"] * 40}, {"calls": [], "x": 1}):
            assert (await client.post("/calls", content=json.dumps(bad))).status_code == 400
        assert len(sessions) == 1
        await sessions.drain(0)
        assert (await client.post("/calls", json=broken)).status_code == 503


@in_loop
async def test_tools_add_routes_and_health() -> None:
    class Extra(FakeTool):
        def routes(self) -> Sequence[BaseRoute]:
            async def answer(request: Request) -> Response:
                return Response("extra")

            return [Route("/extra", answer)]

        def health(self) -> dict[str, int]:
            return {"documents": 3}

    async with app_client(make_app(make_sessions(Extra(echo)), token="t")) as client:
        assert (await client.get("/health")).json()["documents"] == 3
        assert (await client.get("/extra")).status_code == 401
        reply = await client.get("/extra", headers={"authorization": "Bearer t"})
        assert reply.text == "extra"


@in_loop
async def test_idle_sessions_are_gone() -> None:
    clock = Clock()
    sessions = make_sessions(FakeTool(echo), clock=clock, idle_timeout_s=5)
    async with app_client(make_app(sessions)) as client:
        session = await opened(client)
        clock.now += 5
        await sessions.reap()
        reply = await call(client, session, "c")
        assert (reply.status_code, "without a call" in reply.json()["error"]) == (410, True)


@in_loop
async def test_a_full_server_says_when_to_come_again() -> None:
    sessions = make_sessions(max_sessions=1, queue_timeout_s=0.02)
    async with app_client(make_app(sessions)) as client:
        await opened(client)
        reply = await client.post("/sessions", json={"episode_id": "b"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        await sessions.drain(0)
        reply = await client.post("/sessions")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert (await client.get("/health")).json()["status"] == "draining"


@in_loop
async def test_who_hangs_up_while_waiting_gives_its_place_up() -> None:
    sessions = make_sessions(max_sessions=1, queue_timeout_s=20)
    async with served(make_app(sessions)) as url, http(url) as client:
        first = await opened(client)
        async with http(url, 0.05) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await hasty.post("/sessions", json={"episode_id": "hasty"})
        await until(lambda: sessions.waiting == 0)
        waiting = asyncio.create_task(opened(client, "patient"))
        await until(lambda: sessions.waiting == 1)
        await client.delete(f"/sessions/{first}")
        assert sessions.find(await waiting).episode_id == "patient"
        assert len(sessions) == 1


@in_loop
async def test_a_call_whose_client_hangs_up_runs_on_for_its_retry() -> None:
    gate = Gate()
    tool = FakeTool(gate)
    async with served(make_app(make_sessions(tool))) as url, http(url) as client:
        session = await opened(client)
        async with http(url, 0.05) as hasty:
            with pytest.raises(httpx.ReadTimeout):
                await call(hasty, session, "c")
        retry = asyncio.create_task(call(client, session, "c"))
        await asyncio.sleep(0.02)
        gate.open.set()
        assert (await retry).json()["content"] == "c {}"
    assert (len(tool.calls), gate.cancelled) == (1, 0)


@in_loop
async def test_metrics_can_be_read_by_prometheus() -> None:
    backend = FakeSandboxBackend()
    sessions = make_sessions(FakeTool(in_sandbox), FakeTool(echo, "other"), backend=backend, max_sessions=2)
    async with app_client(make_app(sessions)) as client:
        session = await opened(client)
        await opened(client)
        waiting = asyncio.create_task(opened(client))
        await until(lambda: sessions.waiting == 1)
        await call(client, session, "1")
        await call(client, session, "1")
        await call(client, session, "2", "made-up-name")
        backend.opened[0].broken, backend.fault = True, SandboxFailure("none left")
        await call(client, session, "3")
        reply = await client.get("/metrics")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    calls = {
        (sample.labels["tool"], sample.labels["status"]): sample.value
        for sample in families["agentrl_tool_calls"].samples
        if sample.name.endswith("_total")
    }
    assert calls == {("fake", "ok"): 1, ("(unknown)", "invalid"): 1, ("fake", "sandbox_failure"): 1}
    single = {name: family.samples[0].value for name, family in families.items() if len(family.samples) == 1}
    assert single["agentrl_sessions_open"] == 2
    assert single["agentrl_sessions_waiting"] == 1
    assert single["agentrl_sandboxes_open"] == 0
    values = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert values["agentrl_sandbox_start_seconds_count"] == 1
    assert values["agentrl_sandbox_failures_total"] == 1
    assert values["agentrl_sessions_reaped_total"] == 0


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
@in_loop
async def test_many_sessions_without_a_lost_or_swapped_reply(count: int) -> None:
    sessions = make_sessions(FakeTool(_late_echo), max_sessions=count)
    async with served(make_app(sessions)) as url:
        await play_at_once(url, count, 2, "fake", "@")
    counted = sessions.metrics.registry.get_sample_value
    assert counted("agentrl_tool_calls_total", {"tool": "fake", "status": "ok"}) == 2 * count
    assert len(sessions) == 0


async def _late_echo(session: ToolSession, call: ToolCall) -> ToolResult:
    await asyncio.sleep(hash(session.id) % 7 / 1000)  # so that replies come in another order than calls
    return ToolResult(call.id, ToolStatus.OK, f"printed {call.arguments['code']}")
