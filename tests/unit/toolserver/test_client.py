"""The client of tool servers, against servers that lose replies, restart, refuse and die."""

import asyncio
import time

import pytest
from deadlines import until

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import ConfigError, EnvironmentFailure, SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.client import client as client_module
from agentrl.toolserver.client import pool
from agentrl.toolserver.client import server as server_module
from agentrl.toolserver.client.client import ToolServerClient
from tests.unit.toolserver.fake_hosts import in_loop
from tests.unit.toolserver.fake_server import fake_servers

KEY = "tools.python.url"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(server_module, "BACKOFF_S", 0.005)
    monkeypatch.setattr(pool, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(pool, "RETURN_S", 0.2)


def connect(*servers, **options):
    return ToolServerClient(",".join(server.url for server in servers), ClientConfig(**options), key=KEY)


def call(name="1", **arguments):
    return ToolCall(name, "python", arguments)


@in_loop
async def test_an_episode_has_one_session_opened_at_its_first_calls():
    async with fake_servers() as (server,):
        client = connect(server)
        assert server.asked == []
        results = await asyncio.gather(*(client.call(call(str(n), n=n), episode_id="e") for n in range(8)))
        assert [result.content for result in results] == [f'python {{"n": {n}}}' for n in range(8)]
        assert [result.call_id for result in results] == [str(n) for n in range(8)]
        assert server.count("POST", "/sessions") == 1
        assert list(server.sessions.values()) == ["e"]
        assert list(server.processes.values()) == [server_module.PROCESS], "ids come again from run to run"
        for _ in range(2):
            await client.close_session("e")
        await client.close_session("never called")
        assert server.sessions == {}
        assert server.count("DELETE") == 1
        await client.aclose()


@in_loop
async def test_sessions_stay_with_their_server_and_new_ones_go_to_the_least_loaded():
    async with fake_servers(3) as servers:
        client = connect(*servers)

        async def play(episode):
            for number in range(3):
                await client.call(call(str(number)), episode_id=episode)

        await asyncio.gather(*(play(f"e{n}") for n in range(30)))
        assert [len(server.sessions) for server in servers] == [10, 10, 10]
        assert [sum(server.runs.values()) for server in servers] == [30, 30, 30]
        for name in list(servers[1].sessions.values()):
            await client.close_session(name)
        await asyncio.gather(*(play(f"f{n}") for n in range(10)))
        assert [len(server.sessions) for server in servers] == [10, 10, 10]
        await client.aclose()
        assert [len(server.sessions) for server in servers] == [0, 0, 0]


@in_loop
async def test_a_dead_server_is_taken_out_at_once_and_back_when_it_answers():
    async with fake_servers(2) as (dead, live_server):
        client = connect(dead, live_server)
        for name in ("a", "b", "c", "d"):
            await client.call(call(), episode_id=name)
        lost = sorted(dead.sessions.values())
        assert len(lost) == 2
        await dead.stop()
        with pytest.raises(ToolFailure, match=rf"{dead.url} \({KEY}\) does not answer"):
            await client.call(call("2"), episode_id=lost[0])
        began = time.monotonic()
        with pytest.raises(ToolFailure, match="is down: it does not answer"):  # without a try of its own
            await client.call(call("2"), episode_id=lost[1])
        await client.close_session(lost[1])
        assert time.monotonic() - began < client_module.WAIT_S / 2
        assert (await client.call(call(), episode_id="new")).status is ToolStatus.OK
        assert "new" in live_server.sessions.values()
        dead.instance, dead.sessions = "second", {}
        await dead.start()
        await until(lambda: dead.asked[-1] == ("GET", "/health"))
        await asyncio.sleep(0.05)
        await client.call(call(), episode_id="newer")
        assert list(dead.sessions.values()) == ["newer"]
        with pytest.raises(SandboxFailure, match="no longer has the session"):
            await client.call(call("2"), episode_id=lost[0])
        await client.aclose()


@in_loop
async def test_a_session_is_opened_elsewhere_where_its_server_is_dead():
    async with fake_servers(3) as servers:
        client = connect(*servers)
        await servers[0].stop()
        await asyncio.gather(*(client.call(call(), episode_id=f"e{n}") for n in range(8)))
        assert [len(server.sessions) for server in servers] == [0, 4, 4]
        await client.aclose()


@in_loop
async def test_no_server_left():
    async with fake_servers(2) as servers:
        client = connect(*servers, retries=1)
        for server in servers:
            await server.stop()
        with pytest.raises(ToolFailure) as caught:
            await client.call(call(), episode_id="e")
        for words in (servers[0].url, servers[1].url, f"change {KEY}"):
            assert words in str(caught.value)
        await servers[1].start()
        await until(lambda: servers[1].count("GET", "/health") > 0)
        assert (await client.call(call(), episode_id="e")).status is ToolStatus.OK  # a failure is not kept
        await client.aclose()


@in_loop
async def test_new_sessions_wait_for_a_server_that_is_started_anew(monkeypatch):
    monkeypatch.setattr(pool, "RETURN_S", 5.0)
    async with fake_servers() as (server,):
        client = connect(server, retries=1)
        await server.stop()
        calls = [asyncio.create_task(client.call(call(), episode_id=f"e{n}")) for n in range(4)]
        await asyncio.sleep(0.1)
        await server.start()
        assert [result.status for result in await asyncio.gather(*calls)] == [ToolStatus.OK] * 4
        await client.aclose()


@in_loop
async def test_a_lost_reply_is_asked_for_again_and_nothing_runs_twice():
    async with fake_servers(2) as servers:
        client = connect(*servers)
        await asyncio.gather(*(client.call(call("0"), episode_id=f"e{n}") for n in range(4)))
        for server in servers:
            server.lose = ["/call", "/call"]
        results = await asyncio.gather(*(client.call(call("1", n=n), episode_id=f"e{n}") for n in range(4)))
        assert [result.content for result in results] == [f'python {{"n": {n}}}' for n in range(4)]
        assert all(server.lose == [] and set(server.runs.values()) == {1} for server in servers)
        await client.aclose()


@in_loop
async def test_a_lost_session_is_the_same_when_asked_for_again():
    async with fake_servers() as (server,):
        server.lose = ["/sessions"]
        client = connect(server)
        await client.call(call(), episode_id="e")
        assert server.count("POST", "/sessions") == 2
        assert len(server.sessions) == 1
        await client.aclose()


@in_loop
async def test_a_session_that_can_be_resumed_is_opened_again_and_its_call_repeated(caplog):
    async with fake_servers() as (server,):
        client = ToolServerClient(server.url, ClientConfig(), key=KEY, resumable=True)
        assert not client.keeps_sessions, "nothing of it ends with the server"
        await client.call(call("0"), episode_id="e")

        async def restarts(body):
            await server.restart()
            return {"status": "ok", "content": "late"}

        first, server.work = server.work, restarts
        calling = asyncio.create_task(client.call(call("1"), episode_id="e"))
        await until(lambda: server.count("POST", "/sessions") > 1 or calling.done())
        server.work = first
        assert (await calling).content == "python {}"
        assert "is opened again" in caplog.text
        await client.aclose()


@in_loop
async def test_a_call_is_never_sent_to_a_process_that_has_not_seen_it():
    """The reply is lost as the server restarts; by accident the new process has a session of that very name."""
    async with fake_servers() as (server,):
        client = connect(server)
        await client.call(call("0"), episode_id="e")
        names = dict(server.sessions)

        async def restarts(body):
            await server.restart()
            server.sessions = names
            return {"status": "ok", "content": "late"}

        server.work = restarts
        with pytest.raises(SandboxFailure, match="was restarted"):
            await client.call(call("1"), episode_id="e")
        assert server.runs["e/1"] == 1
        await client.aclose()


def test_results_and_failures():
    @in_loop
    async def ends(answer, expected):
        async with fake_servers() as (server,):
            client = connect(server, retries=1)
            server.answers["/call"] = [answer] * 2
            if isinstance(expected, ToolResult):
                assert await client.call(call(), episode_id="e") == expected
            else:
                kind, words = expected
                with pytest.raises(kind, match=words) as caught:
                    await client.call(call(), episode_id="e")
                assert type(caught.value) is kind
            server.answers.clear()  # one failure is no reason to take a server out
            assert (await client.call(call("2"), episode_id="other")).status is ToolStatus.OK
            await client.aclose()

    for status in ToolStatus:  # ToolRunner, not the client, raises those that are failures of the infrastructure
        result_body = {"call_id": "1", "status": status, "content": "text", "data": {"exit_code": 1}}
        ends((200, result_body), ToolResult("1", ToolStatus(status), "text", {"exit_code": 1}))
    failed = {"call_id": "1", "content": "why", "data": None}
    for answer, kind, words in (
        ((200, failed | {"status": "fine"}), ToolFailure, "unknown status 'fine'"),
        ((200, failed | {"status": "ok", "call_id": "2"}), ToolFailure, "answered call '2' instead of '1'"),
        ((200, ["what"]), ToolFailure, "is not a tool server"),
        ((200, b"<html>"), ToolFailure, "is not a tool server"),
        ((404, {"error": "no session"}), SandboxFailure, "no longer has the session: no session"),
        ((410, {"error": "idle"}), SandboxFailure, "no longer has the session: idle"),
        ((409, {"error": "other content"}), EnvironmentFailure, "call id '1' of tool 'python' was used before"),
        ((401, {"error": "who"}), ConfigError, r"set tools\.python\.options\.client\.token or AGENTRL_TOOLS_TOKEN"),
        ((500, {"error": "bug"}), ToolFailure, "did not answer call '1' of 'python': HTTP 500: bug"),
        ((503, {"error": "stops"}), ToolFailure, "HTTP 503: stops"),
    ):
        ends(answer, (kind, words))
    ends((400, {"error": "half a character"}), ToolResult("1", ToolStatus.INVALID, "python: half a character"))


@in_loop
async def test_arguments_that_are_no_json():
    async with fake_servers() as (server,):
        client = connect(server)
        result = await client.call(call(n=float("nan")), episode_id="e")
        assert result.status is ToolStatus.INVALID
        assert "cannot be sent as JSON" in result.content
        half = await client.call(call("3", text="\ud800"), episode_id="e")
        assert half.status is ToolStatus.INVALID
        assert "surrogates not allowed" in half.content
        big = await client.call(call("2", n=10**30), episode_id="e")
        assert str(10**30) in big.content
        await client.aclose()


@in_loop
async def test_a_full_server_is_asked_again_and_then_named():
    async with fake_servers(2) as (full, free_server):
        client = connect(full, free_server, retries=1)
        refusal = 503, {"error": "all 2 sessions are taken"}
        full.answers["/sessions"] = [refusal] * 9
        await client.call(call(), episode_id="a")
        assert list(free_server.sessions.values()) == ["a"]
        free_server.answers["/sessions"] = [refusal]
        await client.call(call(), episode_id="b")  # in the second round
        free_server.answers["/sessions"] = [refusal] * 2
        with pytest.raises(ToolFailure, match=r"all 2 sessions are taken.*server\.max_sessions"):
            await client.call(call(), episode_id="c")
        await client.aclose()


@in_loop
async def test_a_full_server_says_when_to_ask_again():
    async with fake_servers() as (server,):
        client = connect(server, retries=1)
        server.answers["/sessions"] = [(503, {"error": "full"}, "retry-after: 1\r\n")]
        began = time.monotonic()
        await client.call(call(), episode_id="e")
        assert time.monotonic() - began > 0.15  # pool.RETURN_S bounds it here
        await client.aclose()


@in_loop
async def test_a_server_of_other_tools_is_no_fault_of_the_policy(caplog):
    python = Tool("python", "Run it.", {"type": "object"})
    async with fake_servers() as (server,):
        client = ToolServerClient(server.url, ClientConfig(), key=KEY, tools=[python])
        server.tools = [{"name": "perl", "description": "", "parameters": {}}]
        with pytest.raises(ConfigError, match=rf"{server.url} \({KEY}\) has no tool 'python'; it has: perl"):
            await client.call(call(), episode_id="e")
        server.tools = [{"name": "python", "description": "Run it.", "parameters": {"type": "object"}}]
        for name in ("f", "g"):
            await client.call(call(), episode_id=name)
        assert server.count("GET", "/tools") == 2
        assert caplog.messages == []
        await server.restart()
        server.tools[0]["description"] = "Run it, and keep variables."
        await client.call(call(), episode_id="h")
        assert "started with other options than tools.python.options" in caplog.text
        await client.aclose()


@in_loop
async def test_the_token_is_sent(monkeypatch):
    async with fake_servers() as (server,):
        for options in ({"token": "secret"}, {}):
            monkeypatch.setenv("AGENTRL_TOOLS_TOKEN", "of the environment")
            client = connect(server, **options)
            await client.call(call(), episode_id="e")
            await client.aclose()
        tokens = [headers.get("authorization") for headers in server.headers]
        assert tokens == ["Bearer secret"] * 3 + ["Bearer of the environment"] * 3


@in_loop
async def test_an_episode_does_not_wait_for_a_slow_end(monkeypatch):
    monkeypatch.setattr(client_module, "WAIT_S", 0.05)
    async with fake_servers() as (server,):
        client = connect(server)
        await client.call(call(), episode_id="e")
        server.gate.clear()
        began = time.monotonic()
        await client.close_session("e")
        assert time.monotonic() - began < 1
        assert server.sessions
        server.gate.set()
        await client.aclose()
        assert not server.sessions


@in_loop
async def test_sessions_that_end_while_their_server_is_unreachable_are_closed_before_it_gets_others():
    """As when the network fails, or the server's machine stalls: its process goes on, with all of its places taken."""
    async with fake_servers() as (server,):
        client = connect(server)
        for name in ("a", "b"):
            await client.call(call(), episode_id=name)
        await server.stop()
        with pytest.raises(ToolFailure, match="does not answer"):
            await client.call(call("2"), episode_id="a")
        for name in ("a", "b"):
            await client.close_session(name)
        await server.start()
        assert sorted(server.sessions.values()) == ["a", "b"]
        assert (await client.call(call(), episode_id="new")).status is ToolStatus.OK
        await until(lambda: list(server.sessions.values()) == ["new"])
        assert server.count("DELETE") == 2
        await client.close_session("new")
        await client.aclose()
        assert server.count("DELETE") == 3


@in_loop
async def test_a_session_that_is_still_being_opened_is_closed_once_it_is():
    """As when an episode is cancelled while it waits in the server's queue."""
    async with fake_servers() as (server,):
        client = connect(server)
        first = asyncio.create_task(client.call(call(), episode_id="e"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await client.close_session("e")
        assert server.count("POST", "/sessions") == server.count("DELETE") == 1
        assert server.sessions == {}
        await client.aclose()


@pytest.mark.parametrize("url", ["localhost:8300", "ftp://host:1", "", " , ", "http://"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match=r"tools\.python\.url="):
        ToolServerClient(url, ClientConfig(), key=KEY)


@in_loop
async def test_hundreds_of_sessions_at_once_and_every_reply_to_its_call():
    async with fake_servers(2) as servers:
        client = connect(*servers)

        async def play(episode):
            for number in range(2):
                reply = await client.call(call(str(number), who=episode), episode_id=f"e{episode}")
                assert reply.content == f'python {{"who": {episode}}}'
            await client.close_session(f"e{episode}")

        await asyncio.gather(*(play(episode) for episode in range(300)))
        assert [server.sessions for server in servers] == [{}, {}]
        assert sum(sum(server.runs.values()) for server in servers) == 600
        await client.aclose()


def connect_stateless(*servers, tools=(), **options):
    urls = ",".join(server.url for server in servers)
    return ToolServerClient(urls, ClientConfig(**options), key=KEY, tools=tools, stateless=True)


@in_loop
async def test_stateless_calls_of_many_episodes_share_requests_and_open_no_session():
    async with fake_servers() as (server,):
        client = connect_stateless(server)
        calls = (client.call(call("1", n=n), episode_id=f"e{n}") for n in range(150))
        results = await asyncio.gather(*calls)
        assert [result.content for result in results] == [f'python {{"n": {n}}}' for n in range(150)]
        assert server.count("POST", "/sessions") == 0
        assert [len(body["calls"]) for body in server.bodies] == [64, 64, 22]
        assert (await client.call(call(n=float("nan")), episode_id="e")).status is ToolStatus.INVALID
        odd = await client.call(
            call("\n" * 300, n=1), episode_id="e"
        )  # no id of one call fails the others of its batch
        assert (odd.call_id, odd.status) == ("\n" * 300, ToolStatus.OK)
        await client.close_session("e1")
        await client.aclose()


@in_loop
async def test_a_lost_reply_to_stateless_calls_is_requested_again():
    async with fake_servers() as (server,):
        server.lose = ["/calls", "/calls"]
        client = connect_stateless(server)
        assert (await client.call(call("1", n=1), episode_id="e")).content == 'python {"n": 1}'
        assert server.bodies[0] == server.bodies[-1]
        assert server.count("POST", "/calls") == 3
        await client.aclose()


@in_loop
async def test_stateless_calls_go_to_the_servers_that_answer():
    async with fake_servers(2) as (dead, live_server):
        client = connect_stateless(dead, live_server, retries=0)
        await dead.stop()
        results = await asyncio.gather(*(client.call(call(str(n)), episode_id="e") for n in range(8)))
        assert {result.status for result in results} == {ToolStatus.OK}
        await live_server.stop()
        with pytest.raises(ToolFailure, match=f"no tool server answers .*change {KEY}"):
            await client.call(call(), episode_id="e")
        await client.aclose()


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ((500, {"error": "out of memory"}), ToolFailure, "did not answer stateless calls: HTTP 500: out of memory"),
        ((400, {"error": "has state"}), ToolFailure, "refused stateless calls with status 400: has state"),
        ((401, {"error": "who"}), ConfigError, "AGENTRL_TOOLS_TOKEN"),
        ((200, {"results": []}), ToolFailure, "is not a tool server"),
        ((200, {"results": [3], "server": "x"}), ToolFailure, "which is not a result"),
        ((200, {"results": [], "server": "x"}), ToolFailure, "gave 0 results to 1 calls"),
    ],
)
def test_replies_that_answer_no_stateless_call(answer, kind, words):
    @in_loop
    async def check():
        async with fake_servers() as (server,):
            client = connect_stateless(server, retries=1)
            server.answers["/calls"] = [answer] * 2
            with pytest.raises(kind, match=words):
                await client.call(call(), episode_id="e")
            server.answers.clear()
            assert (await client.call(call("2"), episode_id="e")).status is ToolStatus.OK
            await client.aclose()

    check()


@in_loop
async def test_closing_the_client_ends_stateless_calls_as_failures():
    async with fake_servers() as (server,):
        gate = asyncio.Event()

        async def waits(body):
            await gate.wait()
            return {"status": "ok", "content": ""}

        server.work = waits
        client = connect_stateless(server)
        calls = [asyncio.create_task(client.call(call(str(n)), episode_id="e")) for n in range(200)]
        await until(lambda: server.count("POST", "/calls") == 2)
        await client.aclose()
        gate.set()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, ToolFailure)
            assert "was closed during the call" in str(result)
