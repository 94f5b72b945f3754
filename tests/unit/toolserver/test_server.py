"""A tool server as a process: what it refuses, what it says, and how it ends. Its code runs unsandboxed."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from deadlines import until, wait_until

from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ToolServerConfig
from agentrl.core.child_process import ChildProcess, reserve_port
from agentrl.core.errors import ConfigError, MissingError, PortInUseError, ToolServerError
from agentrl.core.types import ToolCall, ToolStatus
from agentrl.sandbox.registry import make_backend
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend
from agentrl.toolserver.request_limits import TOKEN_VARIABLE
from agentrl.toolserver.server.server import listen, make_app, open_sessions, routes_for_mcp, serve_tools
from tests.unit.toolserver.fake_hosts import FakeTool, echo, in_loop, in_sandbox

pytestmark = pytest.mark.usefixtures("forked_starts")

UNSAFE = ToolServerConfig(sandbox=SandboxConfig(backend="unsafe_subprocess"))


def test_a_port_that_is_taken_is_told_before_anything_starts() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} .*--port"):
            serve_tools([], ToolServerConfig(), host="127.0.0.1", port=port, sandboxed=False)


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no.such.host.invalid", 0), ("127.0.0.1", 70000)])
def test_an_address_that_is_not_ours(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"\(--port \(tools\.NAME\.port\), --host; port 0 is a free one\)"):
        listen(host, port)


def test_other_machines_are_let_in_only_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"server\.token"):
        serve_tools([], ToolServerConfig(), host="0.0.0.0", port=0, sandboxed=False)


def test_version_6_of_the_protocol() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = listen("::1", 0)
    except ConfigError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with listener:
        assert listener.getsockname()[0] == "::1"


def test_the_backend_is_the_one_that_is_named() -> None:
    assert type(make_backend(UNSAFE.sandbox)) is UnsafeBackend
    assert make_backend(SandboxConfig()).name == "bubblewrap"
    assert make_backend(SandboxConfig(backend="docker")).name == "docker"


@in_loop
async def test_tools_are_started_and_closed_also_where_a_later_one_fails() -> None:
    class Watched(FakeTool):
        state = "new"

        async def start(self) -> None:
            self.state = "started"

        async def close(self) -> None:
            self.state = "closed"

    class Broken(FakeTool):
        async def start(self) -> None:
            raise MissingError("no index")

    good = Watched(echo)
    async with open_sessions([good], ToolServerConfig(), sandboxed=False):
        assert good.state == "started"
    assert good.state == "closed"
    again = Watched(echo)
    with pytest.raises(MissingError):
        async with open_sessions([again, Broken(echo, "other")], ToolServerConfig(), sandboxed=False):
            raise AssertionError("not reached")
    assert again.state == "closed"


@in_loop
async def test_without_the_sdk_mcp_clients_read_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    async with (
        open_sessions([FakeTool(echo)], ToolServerConfig(), sandboxed=False) as sessions,
        routes_for_mcp(sessions) as routes,
    ):
        transport = httpx.ASGITransport(make_app(sessions, mounts=routes))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = [await client.request(method, "/mcp") for method in ("GET", "POST", "DELETE")]
            assert {answer.status_code for answer in answers} == {501}
            assert "pip install 'agentrl-framework[mcp]'" in answers[0].json()["error"]
            assert (await client.get("/health")).status_code == 200


@in_loop
async def test_sandboxes_are_real_and_gone_at_the_end() -> None:
    processes_before = set(psutil.Process().children(recursive=True))
    async with open_sessions([FakeTool(in_sandbox)], UNSAFE, sandboxed=True) as sessions:
        session = await sessions.open()
        answer = await session.call(ToolCall("1", "fake", {"code": "print(6 * 7)"}))
        assert (answer.result.status, answer.result.content) == (ToolStatus.OK, "42\n")
        assert set(psutil.Process().children(recursive=True)) > processes_before
    assert set(psutil.Process().children(recursive=True)) <= processes_before


TOOLS = """
import asyncio, time
from agentrl import tool

@tool()
async def nap(seconds: float) -> str:
    "Sleep."
    await asyncio.sleep(seconds)
    return f"slept {seconds:g} s"

not_a_tool = 3
"""


@contextmanager
def server(folder: Path, *words: str) -> Iterator[tuple[ChildProcess, str]]:
    """Run ``agentrl tools serve`` until it answers."""
    with reserve_port() as port:
        command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", *words, f"--port={port}"]
        with ChildProcess.start(command, log=folder / "log.txt", name="server", error=ToolServerError) as child:
            child.wait_healthy(f"http://127.0.0.1:{port}/health", 60)
            yield child, f"http://127.0.0.1:{port}"


async def calls_running(client: httpx.AsyncClient, count: int) -> None:
    async def run() -> bool:
        return f"agentrl_tool_calls_running {count}.0" in (await client.get("/metrics")).text

    await until(run)


async def draining(client: httpx.AsyncClient) -> None:
    async def drains() -> bool:
        return (await client.get("/health")).json()["status"] == "draining"

    await until(drains)


def exit_code(child: ChildProcess, within_s: float = 10.0) -> int | None:
    wait_until(lambda: not child.alive(), within_s)
    return child.exit_code()


def test_a_server_of_ones_own_tool_drains_when_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)

    async def play(child: ChildProcess, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
            session = (await client.post("/sessions")).json()["session_id"]

            async def nap(seconds: float) -> httpx.Response:
                body = {"call_id": f"{seconds}", "tool": "nap", "arguments": {"seconds": seconds}}
                return await client.post(f"/sessions/{session}/call", json=body)

            running = [asyncio.create_task(nap(seconds)) for seconds in (1.0, 60.0)]
            await calls_running(client, 2)
            os.kill(child.pid, signal.SIGTERM)
            await draining(client)
            assert (await client.post("/sessions")).status_code == 503
            assert (await nap(0.1)).status_code == 503
            short, long = [(await task).json() for task in running]
            assert (short["status"], short["content"]) == ("ok", "slept 1 s")
            assert long["status"] == "unavailable"
            assert "the server stops" in long["content"]

    name = f"{tmp_path / 'my_tools.py'}:nap"
    with server(tmp_path, name, "server.drain_timeout_s=2", "server.max_sessions=7") as (child, url):
        assert f"nap serve on {url} (up to 7 sessions)" in child.log_tail()
        asyncio.run(play(child, url))
        assert exit_code(child) == 0, child.log_tail()


def test_a_server_with_code_ends_all_of_it_at_once_when_told_twice(tmp_path: Path) -> None:
    config = tmp_path / "tools.yaml"
    config.write_text(
        "tools: {python: {}, shell: {}}\nsandbox: {backend: unsafe_subprocess}\nserver: {drain_timeout_s: 60}\n"
    )

    async def play(child: ChildProcess, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as client:
            session = (await client.post("/sessions")).json()["session_id"]

            async def run(call_id: str, tool: str, **arguments: str) -> dict[str, str]:
                body = {"call_id": call_id, "tool": tool, "arguments": arguments}
                reply: dict[str, str] = (await client.post(f"/sessions/{session}/call", json=body)).json()
                return reply

            assert (await run("1", "python", code="open('a', 'w').write('from python')"))["status"] == "ok"
            assert (await run("2", "shell", command="cat a"))["content"] == "from python"
            running = asyncio.create_task(run("3", "python", code="import time; time.sleep(60)"))
            await calls_running(client, 1)
            os.kill(child.pid, signal.SIGTERM)
            await draining(client)
            os.kill(child.pid, signal.SIGTERM)
            assert (await running)["status"] == "unavailable"

    with server(tmp_path, "--config", str(config)) as (child, url):
        assert f"python, shell serve on {url} (unsafe_subprocess, up to 512 sessions)" in child.log_tail()
        assert "NOTHING is sandboxed" in child.log_tail()
        asyncio.run(play(child, url))
        started = psutil.Process(child.pid).children(recursive=True) if child.alive() else []
        assert exit_code(child, 5) == 0, child.log_tail()
        assert not alive(started)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run; one that only waits to be reaped by its new parent has ended."""
    live_pids = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                live_pids.append(process)
    return live_pids
