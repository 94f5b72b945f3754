"""python, shell and calculator as users start them: the command line, one server with all three, the contract."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from agentrl_tools.calculator import CalculatorService
from agentrl_tools.python import PythonService
from agentrl_tools.shell import ShellService
from mcp import Client
from shared_runs import command

from agentrl import ToolCall, ToolResult, ToolStatus
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import ChildProcess, reserve_port
from agentrl.core.errors import MissingError
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.testing import check_tool
from agentrl.toolserver.service import HostedService

BARE = (Path(__file__).parent.parent / "unit" / "toolserver" / "bare_mcp_server.py").resolve()


@pytest.fixture(scope="module")
def backend() -> str:
    """The sandbox that this machine can make: the tools are what is tested here."""

    async def try_it() -> None:
        async with BubblewrapBackend(SandboxConfig()):
            pass

    try:
        asyncio.run(try_it())
    except MissingError:
        return "unsafe_subprocess"
    return "bubblewrap"


@pytest.fixture(scope="module")
def url(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "tools.yaml").write_text(
        f"""
sandbox: {{backend: {backend}, limits: {{wall_s: 20}}}}
tools:
  python: {{stateful: true}}
  shell: {{timeout_s: 1.5}}
  calculator:
  counter: {{mcp: {{command: [{sys.executable}, -S, "{BARE}"], prefix: mcp_}}}}
"""
    )
    with reserve_port() as port:
        serve = command("tools", "serve", f"--port={port}", f"--config={folder / 'tools.yaml'}")
        with ChildProcess.start(serve, log=folder / "log", name="the tool server") as server:
            server.wait_healthy(f"http://127.0.0.1:{port}/health", 60)
            yield f"http://127.0.0.1:{port}"


SERVICES = [
    (PythonService(), {"code": "print(6 * 7)"}),
    (ShellService(), {"command": "echo 42"}),
    (CalculatorService(), {"expression": "6 * 7"}),
]


@pytest.mark.parametrize(("service", "arguments"), SERVICES, ids=lambda value: getattr(value, "name", ""))
def test_they_keep_the_contract(service: HostedService, arguments: dict[str, str], url: str) -> None:
    check_tool(service, arguments, url=url, options={"client": {"retries": 1}})


def play(url: str, *calls: tuple[str, dict[str, str]]) -> list[ToolResult]:
    async def main() -> list[ToolResult]:
        client = PythonService().client(url, {})
        try:
            return [
                await client.call(ToolCall(f"c{number}", name, arguments), episode_id="episode")
                for number, (name, arguments) in enumerate(calls)
            ]
        finally:
            await client.close_session("episode")
            await client.aclose()

    return asyncio.run(main())


def test_tools_of_one_server_share_the_sandbox_of_an_episode(url: str) -> None:
    results = play(
        url,
        ("python", {"code": "x = 5\nopen('note.txt', 'w').write('from python')"}),
        ("shell", {"command": "cat note.txt; pwd"}),
        ("python", {"code": "print(x)"}),
        ("shell", {"command": "sleep 30"}),
        ("shell", {"command": "ls"}),
        ("calculator", {"expression": "1/3"}),
        ("mcp_count", {}),
        ("mcp_count", {}),
    )
    contents = [result.content for result in results]
    assert contents[0] == "[no output]"
    assert contents[1].startswith("from python/")
    assert contents[2] == "5"
    assert (results[3].status, contents[3]) == (ToolStatus.TIMEOUT, "[timed out after 1.5 s]")
    assert contents[4:] == ["note.txt", "1/3 ≈ 0.333333333333333", "1", "2"]
    assert [result.content for result in play(url, ("shell", {"command": "ls"}), ("mcp_count", {}))] == [
        "[no output]",
        "1",
    ]


def test_the_same_tools_are_there_over_mcp(url: str) -> None:
    async def main() -> None:
        async with Client(f"{url}/mcp") as client:
            listed = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
            async with httpx.AsyncClient() as http:
                tools = (await http.get(f"{url}/tools")).json()["tools"]
            assert listed == {tool["name"]: tool["parameters"] for tool in tools}
            assert {"python", "shell", "calculator", "mcp_count"} <= set(listed)
            await client.call_tool("python", {"code": "open('kept', 'w').write('mine')"})
            (text,) = (await client.call_tool("shell", {"command": "cat kept"})).content
            assert text.text == "mine"

    asyncio.run(main())
