"""Episodes of the environment `terminal`, with the tool in this process and machines of a real daemon."""

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl_envs.terminal import TerminalEnv
from agentrl_tools.terminal import TerminalService
from dockerd import DockerHost

from agentrl.config.containers import ContainersConfig
from agentrl.containers.attach import attached_command
from agentrl.containers.machine import Command
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.core.task import Task
from agentrl.core.tool import ToolClient
from agentrl.core.types import Message
from agentrl.testing import play_episode
from tests.fake_machine import write_task

pytestmark = pytest.mark.slow

SCRIPT = """#!/bin/sh
[ "$(cat /app/answer.txt)" = 42 ] && score=1 || score=0
printf $score > /logs/verifier/reward.txt
"""


MCP_SERVER = (Path(__file__).parents[1] / "plain_mcp_server.py").read_text()
MCP_TASK = f"""
[[environment.mcp_servers]]
name = "inside"
transport = "stdio"
command = "python3"
args = ["-c", {json.dumps(MCP_SERVER)}, "stdio"]

[[environment.mcp_servers]]
name = "side"
transport = "http"
url = "http://side:8000/mcp"
headers = {{ Authorization = "Bearer ${{MCP_TEST_WORD}}" }}

[[environment.mcp_servers]]
name = "old"
transport = "sse"
url = "http://side:8001/sse"
headers = {{ Authorization = "Bearer ${{MCP_TEST_WORD}}" }}

[agent]
user = "nobody"
"""
SERVE = 'for kind in http:8000 sse:8001; do python3 -c "$0" ${kind%:*} ${kind#*:} & done; wait'
READY = "import socket; [socket.create_connection(('side', port)) for port in (8000, 8001)]"


@pytest.fixture
def client(dockerd: DockerHost, tmp_path: Path) -> Iterator[ToolClient]:
    containers = {"hosts": [dockerd.url], "state": str(tmp_path / "state")}
    client = TerminalService().local_client({}, {"containers": containers, "max_chars": 200})
    yield client
    asyncio.run(client.aclose())


def play(
    client: ToolClient, task: Path, turns: list[str], *, max_turns: int = 9
) -> tuple[float, dict[str, float], str]:
    rollout = play_episode(
        lambda: TerminalEnv(protocol="text"),
        Task("task", (Message("user", "x"),), metadata={"task_folder": str(task)}),
        turns,
        tool_clients={"terminal": client},
        max_turns=max_turns,
    )
    return rollout.reward, rollout.metrics, "\n".join(turn.observation for turn in rollout.turns)


def test_episodes(dockerd: DockerHost, tmp_path: Path, client: ToolClient) -> None:
    task = write_task(tmp_path / "task", dockerd.image, SCRIPT)
    reward, metrics, text = play(
        client,
        task,
        [
            "<bash>pwd; cd /; X=1; mkdir -p /app; sleep 1000 & echo started</bash>",
            "<bash>pwd; echo [$X]; ps ax | grep -c '[s]leep 1000'; seq 1000; false</bash>",
            "<bash>echo 42 > answer.txt; for i in {1..20}; do echo $i; echo $i- >&2; done</bash>",
            "Done.",
        ],
    )
    assert reward == 1.0
    assert metrics["commands"] == 3.0
    assert (metrics["failed_commands"], metrics["timeouts"], metrics["cut_outputs"], metrics["forgeable"]) == (
        1.0,
        0.0,
        1.0,
        0.0,
    )
    assert "/app\nstarted" in text
    assert "/app\n[]\n1\n" in text, "a new shell in the working folder, and the process in the background lives on"
    assert "[exit status 1]" in text
    assert "\n".join(f"{number}\n{number}-" for number in range(1, 21)) in text, "output and errors are in order"
    reward, metrics, _ = play(
        client, task, ["<bash>echo 42 > answer.txt</bash>", "<bash>echo more</bash>"], max_turns=2
    )
    assert reward == 1.0, "an episode that a limit ends is graded, too"


def test_attached_programs_end_with_their_process(dockerd: DockerHost, tmp_path: Path) -> None:
    """Killed, stopped, without input, or with a line that does not end."""

    async def main() -> None:
        config = ContainersConfig(hosts=(dockerd.url,), state=tmp_path / "state")
        spec = MachineSpec(image=dockerd.image, network="no-network")
        async with Machines(config, "attached") as machines, await machines.open(spec, "a") as machine:

            async def start(script: str) -> asyncio.subprocess.Process:
                command = attached_command(machine, ("sh", "-c", script), user=None)
                return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)

            for end in ("kill", "terminate", "eof", "flood"):
                flood = "head -c 20000000 /dev/zero; sleep 1000"
                process = await start(flood if end == "flood" else "sleep 1000 & echo begun; read line")
                if end == "flood":
                    output, errors = await process.communicate()
                    assert len(output) < 20_000_000
                    assert b"a line of the program is too long" in errors
                else:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    assert await process.stdout.readline() == b"begun\n"
                    {"kill": process.kill, "terminate": process.terminate, "eof": process.stdin.close}[end]()
                    await process.wait()
                # A killed process cannot kill what the program has left behind, only end its input.
                pattern = "[r]ead line" if end == "kill" else "[s]leep 1000"
                listed = Command(f"ps ax | grep -c '{pattern}'")
                async with asyncio.timeout(60):
                    while (await machine.run(listed)).output != "0\n":
                        pass
                await machine.run(Command("pkill sleep"))

    asyncio.run(main())


def tool_call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_mcp_servers(
    dockerd: DockerHost, tmp_path: Path, client: ToolClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TEST_WORD", "word")
    task = write_task(tmp_path / "task", dockerd.image, SCRIPT, toml=MCP_TASK)
    service = {
        "image": dockerd.image,
        "command": ["sh", "-c", SERVE.replace("$", "$$"), MCP_SERVER.replace("$", "$$")],
        "healthcheck": {"test": ["CMD", "python3", "-c", READY], "interval": "1s", "retries": 50},
    }
    (task / "environment").mkdir()
    (task / "environment" / "docker-compose.yaml").write_text(json.dumps({"services": {"side": service}}))
    rollout = play_episode(
        TerminalEnv,
        Task("task", (Message("user", "x"),), metadata={"task_folder": str(task)}),
        [
            tool_call("inside_add", number=40) + tool_call("side_add", number=1) + tool_call("old_add", number=5),
            tool_call("inside_add", number=2) + tool_call("bash", command="echo 42 > answer.txt"),
            tool_call("inside_end"),
            tool_call("inside_add", number=1),
            "Done.",
        ],
        tool_clients={"terminal": client},
        max_turns=9,
    )
    texts = [turn.observation for turn in rollout.turns]
    assert "40 as 65534" in texts[0]
    assert "1 as 0" in texts[0]
    assert "5 as 0" in texts[0]
    assert "42 as 65534" in texts[1]
    assert "inside" in texts[3]
    assert [tool.name for tool in rollout.tools] == [
        *("bash", "inside_add", "inside_end", "side_add", "side_end", "old_add", "old_end")
    ]
    assert rollout.reward == 0.0, "nobody may not write to /app"
