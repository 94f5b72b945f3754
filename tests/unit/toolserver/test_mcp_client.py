"""Tools of somebody else's MCP server: a real process that speaks over its streams, and a server of our own by HTTP."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp.types as types
import pytest
from deadlines import wait_for_exit, wait_until

from agentrl.config.toolserver import ServerConfig, ToolServerConfig
from agentrl.core.errors import ConfigError, MissingError, ToolFailure
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.mcp.client import McpService, McpSource, McpTool, from_mcp
from agentrl.toolserver.mcp.connection import McpConnection, McpOptions, kill_with_parent
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions
from agentrl.toolserver.service import make_tools, needs_sandbox
from tests.unit.toolserver.test_mcp import Code, Echo, served

HERE = Path(__file__).parent
COMMAND = (sys.executable, str(HERE / "mcp_server.py"), "argument")
BARE = (sys.executable, "-S", str(HERE / "bare_mcp_server.py"))


class Files(McpService):
    name = "files"


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


@asynccontextmanager
async def hosted(**options: Any) -> AsyncIterator[Sessions]:
    tools = await asyncio.to_thread(Files().make, {"command": COMMAND, **options})
    sessions = Sessions(None, tools, ServerConfig())
    for tool in tools:
        await tool.start()
    try:
        yield sessions
    finally:
        await sessions.stop()
        for tool in tools:
            await tool.close()


calls = 0


async def say(session: Session, tool: str, **arguments: Any) -> ToolResult:
    global calls
    calls += 1
    return (await session.call(ToolCall(f"c{calls}", tool, arguments))).result


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_tools_of_a_command_answer_as_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTRL_TOOLS_TOKEN", "a secret")

    async def main() -> None:
        async with hosted(env={"GIVEN": "1"}, cwd=str(tmp_path), timeout_s=0.5) as sessions:
            session = await sessions.open()
            echo = await say(session, "echo", text="halló")
            assert (echo.status, echo.content) == (ToolStatus.OK, "halló")
            assert (await say(session, "echo")).status is ToolStatus.INVALID
            assert (await say(session, "count")).content == "2"  # the one that did not fit was never sent
            fail = await say(session, "fail")
            assert (fail.status, fail.content) == (ToolStatus.ERROR, "it did not work")
            failed = await say(session, "raise")
            assert failed.status is ToolStatus.UNAVAILABLE
            assert failed.content.endswith("(tools.files) failed in a call: Internal server error")
            refused = await say(session, "refuse")
            assert (refused.status, refused.content) == (ToolStatus.INVALID, "refuse: not these arguments")
            assert (await say(session, "picture")).content == (
                "see:\n[image of type image/png left out: only text can be read]\nwords\n[b: file:///b]"
            )
            figures = await say(session, "figures")
            assert (figures.content, figures.data) == ('{"sum": 3}', {"sum": 3})
            slow = await say(session, "sleep")
            assert (slow.status, slow.content) == (ToolStatus.TIMEOUT, "sleep did not answer in 0.5 s")
            own = await say(session, "own_timeout")
            assert own.status is ToolStatus.UNAVAILABLE
            assert own.content.endswith("the database took too long")
            process = (await say(session, "whoami")).data
            assert process["cwd"] == str(tmp_path)
            assert process["arguments"] == ["argument"]
            assert "GIVEN" in process["variables"]
            assert "AGENTRL_TOOLS_TOKEN" not in process["variables"]

    run(main)


def test_each_episode_has_a_process_that_ends_with_it_and_one_that_dies_takes_no_other_along() -> None:
    async def main() -> None:
        async with hosted(command=BARE) as sessions:
            first_session, other_session = await sessions.open("one"), await sessions.open("other")
            pids = [
                int(message.content)
                for message in await asyncio.gather(say(first_session, "pid"), say(other_session, "pid"))
            ]
            assert pids[0] != pids[1]
            running = asyncio.create_task(say(first_session, "hang"))
            await asyncio.sleep(0.1)
            os.kill(pids[0], signal.SIGKILL)  # in mid-call
            for result in (await running, await say(first_session, "count")):
                assert result.status is ToolStatus.UNAVAILABLE
                assert "(tools.files) failed in a call" in result.content
            assert (await say(other_session, "count")).content == "2"
            await sessions.close(first_session.id)
            again = await say(await sessions.open("one"), "count")
            assert (again.status, again.content) == (ToolStatus.OK, "1")
            await sessions.close(other_session.id)
            assert all(gone(pid) for pid in pids)
            last = int((await say(await sessions.open("one"), "pid")).content)
        assert gone(last)

    run(main)


def test_a_process_that_dies_between_calls_is_a_failure_of_the_next() -> None:
    async def main() -> None:
        async with hosted(command=BARE) as sessions:
            session = await sessions.open()
            pid = int((await say(session, "pid")).content)
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(wait_for_exit, pid)
            assert (await say(session, "count")).status is ToolStatus.UNAVAILABLE

    run(main)


def test_a_shared_server_serves_all_episodes_and_is_started_anew_when_it_dies() -> None:
    async def main() -> None:
        async with hosted(command=BARE, shared=True) as sessions:
            first_session, other_session = await sessions.open("one"), await sessions.open("other")
            assert (await say(first_session, "count")).content == "1"
            assert (await say(other_session, "count")).content == "2"
            await sessions.close(other_session.id)
            assert (await say(first_session, "count")).content == "3"
            pid = int((await say(first_session, "pid")).content)
            assert (await say(first_session, "die")).status is ToolStatus.UNAVAILABLE
            assert (await say(first_session, "count")).content == "1"
            assert gone(pid)

    run(main)


def test_the_process_is_gone_when_the_tool_server_is_killed() -> None:
    program = (
        "import os, subprocess, sys\n"
        "command = [str(os.getpid()) if word == '0' else word for word in sys.argv[1:]]\n"
        "subprocess.run(command)\n"
    )
    stubborn = kill_with_parent(
        0, [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(300)"]
    )
    server = subprocess.Popen([sys.executable, "-S", "-c", program, *stubborn], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        (pid,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    finally:
        server.kill()
        server.communicate()  # which waits for the end of the pipe, and thus of both
    wait_until(lambda: gone(int(pid)), 10)


def test_a_servers_file_may_hold_several_under_names_of_ones_own() -> None:
    def config(*prefixes: str) -> ToolServerConfig:
        tools = {f"files{prefix}": {"mcp": {"command": BARE, "prefix": prefix}} for prefix in prefixes}
        return ToolServerConfig(tools=tools)

    tools = make_tools(config("a_", "b_"))
    assert [tool.spec.name for tool in tools] == [f"{p}_{n}" for p in "ab" for n in ("count", "die", "hang", "pid")]
    assert tools[0].spec.description == "Do count."
    assert tools[0].spec.parameters == {"type": "object", "properties": {}}
    assert not needs_sandbox(config("a_"))
    clash = ToolServerConfig(tools={name: {"mcp": {"command": BARE}} for name in "ab"})
    with pytest.raises(ConfigError, match="there is a tool 'count' at this server already"):
        make_tools(clash)


class FilesService(McpService):
    name = "files"
    command = BARE


def test_a_registered_tool_takes_three_lines() -> None:
    tools = FilesService().tools({})
    assert [tool.name for tool in tools][:2] == ["count", "die"]
    assert {tool.server for tool in tools} == {"files"}
    assert not FilesService.sandboxed
    FilesService().check({"timeout_s": 3})
    with pytest.raises(ConfigError, match=r"tools\.files\.options\.timeout"):
        FilesService().check({"timeout": 3})


def test_the_log_says_that_a_command_is_not_sandboxed(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for tool in FilesService().create_tools(McpOptions()):
            await tool.start()

    run(main)
    (record,) = caplog.records
    assert "runs UNSANDBOXED" in record.getMessage()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ConfigError, "tools.files: set either command or url"),
        ({"command": "a", "url": "http://b"}, ConfigError, "set either command or url"),
        ({"url": "localhost:8300/mcp"}, ConfigError, "write http://HOST:PORT/mcp"),
        ({"command": "python --token 'a"}, ConfigError, "tools.files.command has no words .*: No closing quotation$"),
        ({"command": "no-such-program --x"}, MissingError, "there is no program 'no-such-program' here"),
        ({"command": "true"}, MissingError, r"the MCP server true \(tools.files\) does not answer"),
        ({"command": "sleep 60", "start_timeout_s": 0.3}, MissingError, "does not answer: TimeoutError"),
        ({"url": "http://127.0.0.1:9/mcp"}, MissingError, r"http://127.0.0.1:9/mcp \(tools.files\) does not answer"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_is_served(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Files().make(options)


def test_messages_hold_nothing_secret() -> None:
    assert McpOptions(command="npx server --token=secret").display_name() == "npx"
    assert McpOptions(url="https://me:secret@far:8/mcp?key=secret").display_name() == "https://far:8/mcp"


def test_a_schema_that_is_none_is_refused() -> None:
    for schema in ({"type": "strange"}, {"$ref": "#/nowhere"}):
        tool = types.Tool(name="odd", input_schema={"type": "object", "properties": {"a": schema}})
        with pytest.raises(ConfigError, match=r"tools\.x: no call of the tool 'odd' could fit: its JSON Schema "):
            McpTool(McpSource(McpOptions(url="http://x"), "tools.x"), tool)


def test_a_list_that_is_none_is_named(tmp_path: Path) -> None:
    server = (HERE / "bare_mcp_server.py").read_text().replace('"name": name, ', "")
    (tmp_path / "server.py").write_text(server)
    with pytest.raises(
        MissingError, match=r"answer: ListToolsResult does not fit the protocol: tools\.0\.name: Field required$"
    ):
        FilesService().create_tools(McpOptions(command=(sys.executable, str(tmp_path / "server.py"))))


def test_long_results_are_cut_and_empty_ones_are_told() -> None:
    def content(text: str) -> str:
        result = types.CallToolResult(content=[types.TextContent(text=text)])
        return from_mcp(ToolCall("c", "t"), result, 100).content

    assert content("") == "[no output]"
    assert content("x" * 300) == f"{'x' * 50}\n[… 200 characters left out …]\n{'x' * 50}"


def test_a_server_by_address_has_a_session_for_every_episode() -> None:
    async def main() -> None:
        async with served([Code(), Echo()], sandboxed=True, token="secret") as server:
            options = {"url": server.url, "headers": {"Authorization": "Bearer secret"}}
            async with hosted(command=(), **options) as sessions:
                first_session, other_session = await sessions.open("one"), await sessions.open("other")
                await say(first_session, "code", text="open('kept', 'w').write('mine')")
                kept_file = await say(first_session, "code", text="print(open('kept').read())")
                assert (kept_file.status, kept_file.content) == (ToolStatus.OK, "mine")
                lost = await say(other_session, "code", text="print(open('kept').read())")
                assert lost.status is ToolStatus.ERROR
                assert len(server.sessions) == 2
                await sessions.close(first_session.id)
                await sessions.close(other_session.id)
                assert len(server.sessions) == 0
            with pytest.raises(MissingError, match="does not answer"):
                await asyncio.to_thread(Files().make, {"url": server.url})

    run(main)


def test_a_server_by_address_that_dies_in_a_call_is_a_failure_of_the_tool() -> None:
    stop, address, started = threading.Event(), [], threading.Event()

    def serve() -> None:
        async def main() -> None:
            async with served(patience_s=0) as server:
                address.append(server.url)
                started.set()
                await asyncio.to_thread(stop.wait)

        asyncio.run(main())

    thread = threading.Thread(target=serve)
    thread.start()

    async def main() -> None:
        connection = McpConnection(McpOptions(url=address[0], timeout_s=20), "tools.far")
        try:
            running = asyncio.create_task(connection.call("echo", {"text": "wait 30"}))
            await asyncio.sleep(0.5)
            stop.set()
            with pytest.raises(ToolFailure, match=r"\(tools\.far\)"):
                await running
            with pytest.raises(ToolFailure, match=r"\(tools\.far\)"):
                await connection.call("echo", {"text": "a"})
            assert not connection.alive
        finally:
            await connection.close()

    try:
        assert started.wait(10)
        run(main)
    finally:
        stop.set()
        thread.join()


class Clumsy(Echo):
    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    async def end(self, session: ToolSession) -> None:
        self.ended.append(session.id)
        raise RuntimeError("it could not")


def test_a_tool_that_cannot_end_a_session_does_not_keep_it_open() -> None:
    async def main() -> None:
        tool: HostedTool = Clumsy()
        sessions = Sessions(None, [tool], ServerConfig())
        session = await sessions.open()
        await sessions.close(session.id)
        assert tool.ended == [session.id]
        assert len(sessions) == 0

    run(main)
