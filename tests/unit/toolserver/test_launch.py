"""The real search server, started as a run starts it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from deadlines import wait_until

from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, PortInUseError, ToolServerError
from agentrl.core.registry import env_class
from agentrl.core.types import ToolCall, ToolResult
from agentrl.data.task_sources import EnvTasks
from agentrl.toolserver.launch import launch_tool
from agentrl.toolserver.service import find_service

pytestmark = pytest.mark.usefixtures("forked_starts")

DOCUMENTS = [{"id": "1", "contents": '"Sadova"\nSadova lies in Remu Land.'}]


def corpus(folder: Path, lines: list[str] | None = None) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("\n".join(lines or [json.dumps(row) for row in DOCUMENTS]))
    return path


def test_a_server_answers_and_ends(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "search.log"
    with launch_tool("search", [f"--corpus={corpus(tmp_path)}"], log=log, timeout_s=60) as server:
        server.check()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        health = json.load(opener.open(f"{server.url}/health", timeout=10))
        assert health.pop("server")
        assert health == {"status": "ok", "sessions": 0, "corpora": {"default": 1}, "searched": 0}
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive(), 10)
        with pytest.raises(
            ToolServerError, match=r"(?s)tool server 'search' ended \(signal SIGKILL\).*search serve on http"
        ):
            server.check()
    server.stop()


def test_a_corpus_that_cannot_be_read_is_the_users_mistake(tmp_path: Path) -> None:
    path = corpus(tmp_path, ['{"id": "1", "contents": "\\"A\\"\\na"}', '{"id": "2", "text": "b"}'])
    with pytest.raises(ConfigError, match=r"(?s)line 2 has no.*'contents'"):
        launch_tool("search", [f"--corpus={path}"], log=tmp_path / "log", timeout_s=60)


def test_a_port_in_use_names_the_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"tools\.search\.port={port} .*tools\.search\.port to a free port"):
            launch_tool("search", [f"--corpus={corpus(tmp_path)}"], log=tmp_path / "log", port=port)


def test_the_server_dies_with_a_run_that_is_killed(tmp_path: Path) -> None:
    run = (
        "import pathlib, time\n"
        "from agentrl.toolserver.launch import launch_tool\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        f"print(launch_tool('search', ['--corpus={corpus(tmp_path)}'], log=log, timeout_s=60).url, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    port = int(parent.stdout.readline().strip().rpartition(":")[2])
    parent.stdout.close()
    parent.kill()
    parent.wait()
    wait_until(lambda: not listens(port), 10)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


OWN_FILE = '''
from agentrl import Env, register_tool, tool
from agentrl.core.registry import served_tools

@register_tool("launched_greeting")
@tool
async def greet(name: str) -> str:
    """Greet."""
    return f"Hello {name}"

class Greeter(Env):
    tool_names = ("launched_greeting",)

    def __init__(self):
        self.tools = served_tools("launched_greeting")
'''


def test_a_tool_that_the_environments_file_registers_has_a_server(tmp_path: Path) -> None:
    """The server is another process, which finds the name only if it loads the file."""
    (tmp_path / "greeter.py").write_text(OWN_FILE, encoding="utf-8")
    (offered_tool,) = env_class(f"{tmp_path}/greeter.py:Greeter")().tools
    service = find_service(offered_tool.server)
    arguments = service.launch_arguments({}, EnvTasks(Env, 0, {}), tmp_path / "server")

    async def call(url: str) -> ToolResult:
        client = service.client(url, {})
        try:
            return await client.call(ToolCall("c", offered_tool.name, {"name": "Ann"}), episode_id="e")
        finally:
            await client.aclose()

    with launch_tool(offered_tool.server, arguments, log=tmp_path / "log") as server:
        assert asyncio.run(call(server.url)).content == "Hello Ann"
