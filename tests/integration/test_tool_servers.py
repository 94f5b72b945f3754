"""Episodes with real tool servers in processes of their own, which die, fill up and lose replies. Not sandboxed."""

import asyncio
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from deadlines import until

from agentrl import Env, Task
from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import SandboxFailure, ToolFailure
from agentrl.core.registry import served_tools
from agentrl.core.types import Message, ToolCall, ToolStatus
from agentrl.testing import ContractError, check_tool, play_episode
from agentrl.toolserver.client import pool as pool_module
from agentrl.toolserver.client.client import ToolServerClient
from agentrl.toolserver.launch import launch_tool
from agentrl.toolserver.service import find_service

UNSAFE = {"sandbox": {"backend": "unsafe_subprocess"}}
SERVE = ["sandbox.backend=unsafe_subprocess"]


@contextmanager
def servers(folder, count, *settings):
    """Start servers of the Python tool side by side."""

    def start(number):
        return launch_tool("python", [*SERVE, *settings], log=folder / f"{number}.log")

    with ExitStack() as exits, ThreadPoolExecutor(count) as threads:
        yield [exits.enter_context(server) for server in threads.map(start, range(count))]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two servers that no test kills."""
    with servers(tmp_path_factory.mktemp("two"), 2, "server.max_sessions=6") as started:
        yield started


def connect(*started, **options):
    return ToolServerClient(",".join(server.url for server in started), ClientConfig(**options), key="tools.python.url")


def run(code, name="1"):
    return ToolCall(name, "python", {"code": code})


def sessions(server):
    return httpx.get(f"{server.url}/health", trust_env=False).json()["sessions"]


def calling(server):
    """Return how many calls run there."""
    reply = httpx.get(f"{server.url}/metrics", trust_env=False)
    running = re.search(r"^agentrl_tool_calls_running ([\d.]+)$", reply.text, re.MULTILINE)
    assert running, (server.url, reply, reply.headers, reply.text)
    return float(running[1])


async def emptied(*started):
    """Wait until the servers have closed all sessions."""

    async def empty():
        return not any(await asyncio.gather(*(asyncio.to_thread(sessions, server) for server in started)))

    await until(empty)


class LosingProxy:
    """Stands before a server; replies to calls whose body holds ``LOSE`` are lost, each once."""

    def __init__(self, port):
        self.port = port
        self.lost = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self.server.close()

    async def serve(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                body = await reader.readexactly(length)
                there_writer.write(head + body)
                reply = await there_reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in reply.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                reply += await there_reader.readexactly(length)
                if b"LOSE" in body and body not in self.lost:
                    self.lost.add(body)
                    break
                writer.write(reply)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.transport.abort()
            there_writer.close()


def test_every_reply_comes_to_its_call_and_every_session_has_its_own_files(two):
    """More episodes than the servers take at once: they wait, and none is refused."""

    async def play(client, episode):
        for turn in range(3):
            code = f"open('log', 'a').write('{episode}.{turn} '); print(open('log').read())"
            reply = await client.call(run(code, str(turn)), episode_id=f"many-{episode}")
            assert reply.status is ToolStatus.OK
            assert reply.call_id == str(turn)
            assert reply.content.split() == [f"{episode}.{index_before}" for index_before in range(turn + 1)]
        await client.close_session(f"many-{episode}")

    async def all_of_them():
        client = connect(*two)
        await asyncio.gather(*(play(client, episode) for episode in range(20)))
        await client.aclose()
        await emptied(*two)

    asyncio.run(all_of_them())


def test_a_lost_reply_does_not_run_the_code_again(two):
    async def play():
        async with LosingProxy(int(two[0].url.rpartition(":")[2])) as proxy:
            client = connect(proxy)
            for number in range(3):
                code = f"open('log', 'a').write('{number}')  # LOSE\nprint(open('log').read())"
                reply = await client.call(run(code, str(number)), episode_id="lossy")
                assert reply.content.strip() == "012"[: number + 1]
            assert len(proxy.lost) == 3
            await client.close_session("lossy")
            await client.aclose()
        await emptied(two[0])

    asyncio.run(play())


def test_a_server_killed_in_mid_call_ends_its_episodes_and_no_other(tmp_path, monkeypatch):
    """And when it is started anew, episodes of before have lost their files and are told so."""
    monkeypatch.setattr(pool_module, "PROBE_EVERY_S", 0.05)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a server that is killed leaves its sessions' folders

    async def play(doomed, survivor):
        client = connect(doomed, survivor, retries=1)
        for name in ("a", "b"):
            await client.call(run("open('note', 'w').write('x')", "first"), episode_id=name)
        assert (sessions(doomed), sessions(survivor)) == (1, 1)
        code = "import time; time.sleep(1.5); print('slept')"
        slow = [asyncio.create_task(client.call(run(code), episode_id=name)) for name in ("a", "b")]

        async def both_run():
            return await asyncio.to_thread(calling, doomed) == await asyncio.to_thread(calling, survivor) == 1

        await until(both_run)
        os.kill(doomed.pid, signal.SIGKILL)
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert isinstance(ended[0], ToolFailure), ended
        assert ended[1].content.strip() == "slept"
        await client.call(run("print(2)"), episode_id="a~1")
        assert sessions(survivor) == 2
        port = int(doomed.url.rpartition(":")[2])
        with await asyncio.to_thread(launch_tool, "python", SERVE, log=tmp_path / "again.log", port=port):
            names = iter(range(100))

            async def back():
                """Whether an episode that begins now comes to it: it has none, the other has two."""
                reply = await client.call(run("print(1)"), episode_id=f"c{next(names)}")
                assert reply.content.strip() == "1"
                return sessions(doomed) == 1

            await until(back)
            with pytest.raises(SandboxFailure, match="no longer has the session"):
                await client.call(run("print(open('note').read())", "2"), episode_id="a")
            await client.aclose()

    with servers(tmp_path, 2) as started:
        asyncio.run(play(*started))


class Coding(Env):
    tool_names = ("python",)

    def __init__(self):
        self.tools = served_tools("python")

    def step(self, action):
        return (), 1.0, True, False, {}


def test_an_episode_with_a_real_server(two):
    code = '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'
    client = connect(two[0])
    rollout = play_episode(Coding, Task("t", (Message("user", "?"),)), [code, "42"], tool_clients={"python": client})
    assert rollout.turns[0].observation.strip() == "42"
    assert sessions(two[0]) == 0


def test_check_tool_with_a_server_and_without(two):
    service = find_service("python")
    check_tool(service, {"code": "print(1)"}, url=two[0].url, options=UNSAFE)
    check_tool(service, {"code": "print(1)"}, options=UNSAFE)
    with pytest.raises(ContractError, match=r"must answer \{'code': '1/0'\} with status ok"):
        check_tool(service, {"code": "1/0"}, options=UNSAFE)
    with pytest.raises(ContractError, match="python has no tool 'perl'; it has: python"):
        check_tool(service, {"code": "1"}, options=UNSAFE, name="perl")
    assert sessions(two[0]) == 0
