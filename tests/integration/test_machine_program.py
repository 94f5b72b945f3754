"""Agent programs in machines of a real daemon, with the tool `terminal` in this process and a scripted policy."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import docker
import pytest
from agentrl_envs.terminal import TerminalEnv
from agentrl_tools.terminal import TerminalService
from deadlines import wait_until
from dockerd import DockerHost
from gateway_episodes import make_test_renderer
from program_episodes import LIMITS, play_program

from agentrl import Message, Rollout, Task
from agentrl.config.agent import AgentConfig
from agentrl.containers.leases import MACHINE_LABEL
from agentrl.core.errors import MissingError
from agentrl.core.tool import ToolClient
from agentrl.core.types import ANSWER
from agentrl.episode.limits import Limits
from agentrl.render.renderer import ChatRenderer
from tests.fake_machine import write_task

TESTS = """#!/bin/sh
[ "$(cat /app/answer.txt)" = 42 ] && score=1 || score=0
printf $score > /logs/verifier/reward.txt
"""
AGENT = """
import json, os, socket, subprocess, sys, urllib.request

def turn(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def attempt(host, port):
    try:
        socket.create_connection((host, port), 3)
    except OSError as error:
        return type(error).__name__
    return "connected"

prompt = sys.stdin.read()
assert prompt == os.environ["AGENTRL_PROMPT"]
messages = [{"role": "user", "content": prompt}]
while True:
    message = turn(messages)
    messages.append(message)
    command = message["content"]
    if command == "done" or "rollout.max_turns" in command:
        break
    if command.startswith("connect "):
        _, host, port = command.split()
        output = attempt(host, int(port))
    elif command == "crash":
        print("it goes wrong")
        sys.exit(3)
    else:
        output = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
    messages.append({"role": "user", "content": "output: " + output})
print("the last line")
"""


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return make_test_renderer()


def terminal_client(url: str, state: Path, **containers: object) -> ToolClient:
    return TerminalService().local_client({}, {"containers": {"hosts": [url], "state": str(state), **containers}})


def play_task(
    client: ToolClient,
    renderer: ChatRenderer,
    task_folder: Path,
    turns: Sequence[str] | Callable[[str], str],
    limits: Limits = LIMITS,
    **options: object,
) -> Rollout:
    """Play an episode with the program `AGENT`, which the turns of the policy lead, unless ``options`` name another."""
    files = task_folder.parent / "agent"
    files.mkdir()
    (files / "agent.py").write_text(AGENT)
    settings = {"command": "python3 agent.py", "files": files, "answer": "output", **options}
    config = AgentConfig.model_validate({**settings, "sandbox": "container", "reward": "environment"})
    task = Task("task", (Message("user", "x"),), metadata={"task_folder": str(task_folder)})
    env = partial(TerminalEnv, protocol="program")
    clients = {"terminal": client}
    rollout, _ = play_program(config, turns, renderer, task=task, env=env, clients=clients, limits=limits)
    return rollout


@pytest.fixture
def client(dockerd: DockerHost, tmp_path: Path) -> Iterator[ToolClient]:
    client = terminal_client(dockerd.url, tmp_path / "state")
    yield client
    asyncio.run(client.aclose())


Play = Callable[..., Rollout]


@pytest.fixture
def play(dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path) -> Play:
    """Play an episode of a task of one step; see `play_task`."""

    def play(turns: Sequence[str], **options: Any) -> Rollout:
        folder = write_task(tmp_path / "task", dockerd.image, TESTS)
        return play_task(client, renderer, folder, turns, **options)

    return play


def outputs(rollout: Rollout, renderer: ChatRenderer) -> list[str]:
    (row,) = rollout.rows
    text = renderer.decode(row.token_ids.tolist())
    return [part.partition("<|im_end|>")[0] for part in text.split("output: ")[1:]]


def test_a_program_works_in_the_machine_and_is_graded_there(play: Play, renderer: ChatRenderer) -> None:
    turns = ["pwd; id -u; ls /tests /solution", "connect 127.0.0.1 3128", "connect 10.0.0.1 80", "echo 42 > answer.txt"]
    rollout = play([*turns, "done"])
    assert rollout.failure is None, rollout.failure
    assert outputs(rollout, renderer) == ["/app\n0\n", "ConnectionRefusedError", "OSError", ""]
    assert (rollout.reward, rollout.metrics["forgeable"], rollout.metadata[ANSWER]) == (1.0, 0.0, "the last line\n")
    (row,) = rollout.rows
    sampled = "".join(f"{turn}<|im_end|>" for turn in [*turns, "done"])
    assert renderer.decode(row.token_ids[row.mask == 1].tolist()) == sampled


@pytest.mark.long
def test_the_limit_of_a_task_ends_its_program_which_is_graded_as_it_is(
    dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", dockerd.image, TESTS, toml="[agent]\ntimeout_sec = 5\n")
    rollout = play_task(client, renderer, folder, ["echo 42 > answer.txt", "sleep 1000"])
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, len(rollout.turns)) == (1.0, 2)


def test_a_limit_ends_an_episode_that_is_graded_as_it_is(play: Play) -> None:
    rollout = play(["echo 42 > answer.txt", "true", "true"], limits=replace(LIMITS, max_turns=2))
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, len(rollout.turns)) == (1.0, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("turns", "options", "limits", "message"),
    [
        (["crash"], {}, LIMITS, "it ended with exit status 3. The end of its output:\nit goes wrong"),
        (["sleep 1000"], {}, replace(LIMITS, max_seconds=12.0), "it did not end within rollout.max_seconds=12"),
        ([], {"command": "true"}, LIMITS, "it ended without a turn of the policy"),
    ],
)
def test_what_goes_wrong_is_named(
    play: Play, turns: list[str], options: dict[str, str], limits: Limits, message: str
) -> None:
    rollout = play(turns, limits=limits, **options)
    assert rollout.failure is not None
    assert rollout.failure.error == "AgentProgramError"
    assert message in rollout.failure.message


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"command": "no-such-agent --fast"}, "there is no program no-such-agent in the machine of the task"),
        ({"command": None, "harness": "mini_swe_agent"}, "there is no program mini in the machine of the task"),
    ],
)
def test_a_missing_program_ends_the_run(play: Play, options: dict[str, str | None], message: str) -> None:
    with pytest.raises(MissingError, match=message):
        play([], **options)


MCP_SERVER = """
[[environment.mcp_servers]]
name = "answers"
transport = "stdio"
command = "sed"
args = ["-u", "s/.*/42/"]
"""
ASK_SERVER = """python3 -c '
import json, os, subprocess
server = json.load(open(os.environ["AGENTRL_MCP_CONFIG"]))["mcpServers"]["answers"]
assert server["type"] == "stdio"
words = [server["command"], *server["args"]]
print(subprocess.run(words, input="what is it?", capture_output=True, text=True).stdout)
' > answer.txt"""


@pytest.mark.long
def test_a_program_finds_the_mcp_servers_of_its_task(
    dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", dockerd.image, TESTS, toml=MCP_SERVER)
    rollout = play_task(client, renderer, folder, [ASK_SERVER, "done"])
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0


@pytest.mark.long
def test_a_harness_and_mcp_servers_are_refused(
    dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", dockerd.image, TESTS, toml=MCP_SERVER)
    with pytest.raises(
        MissingError, match=r"harness=mini_swe_agent: the task has MCP servers \(answers\).*agent.command"
    ):
        play_task(client, renderer, folder, [], command=None, harness="mini_swe_agent")


def answer_requests(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")


@pytest.mark.long
def test_a_program_reaches_the_allowed_hosts_only(
    dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", dockerd.image, TESTS)
    toml = (folder / "task.toml").read_text()
    allowed = 'network_mode = "allowlist"\nallowed_hosts = ["127.0.0.2"]'
    (folder / "task.toml").write_text(toml.replace('network_mode = "no-network"', allowed))
    with socket.create_server(("127.0.0.2", 0)) as server:
        threading.Thread(target=answer_requests, args=(server,), daemon=True).start()
        get = "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://{}:{}/\").read())' 2>&1 | tail -n 1"
        port = server.getsockname()[1]
        rollout = play_task(
            client, renderer, folder, [get.format("127.0.0.2", port), get.format("127.0.0.3", port), "done"]
        )
        server.shutdown(socket.SHUT_RDWR)
    assert rollout.failure is None, rollout.failure
    allowed_answer, other_answer = outputs(rollout, renderer)
    assert allowed_answer == "b'hi'\n"
    assert "403" in other_answer


@pytest.mark.long
def test_steps_of_a_task_start_the_program_again_in_the_same_machine(
    dockerd: DockerHost, client: ToolClient, renderer: ChatRenderer, tmp_path: Path
) -> None:
    folder = write_task(tmp_path / "task", dockerd.image, TESTS)
    with (folder / "task.toml").open("a") as file:
        file.write('[[steps]]\nname = "first"\n[[steps]]\nname = "second"\n')
    (folder / "instruction.md").unlink()
    for name in ("first", "second"):
        step = folder / "steps" / name
        shutil.copytree(folder / "tests", step / "tests")
        (step / "instruction.md").write_text(f"This is {name}.")
    shutil.rmtree(folder / "tests")

    def speak(prompt: str) -> str:
        if prompt.count("<|im_start|>assistant") > 1:
            return "done"
        return "echo 41 > answer.txt" if "This is first." in prompt else "cat answer.txt; echo 42 > answer.txt"

    rollout = play_task(client, renderer, folder, speak)
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, rollout.metrics["steps"]) == (0.5, 2.0)
    texts = [renderer.decode(row.token_ids.tolist()) for row in rollout.rows]
    assert ["This is first." in text for text in texts] == [True, False]
    assert "output: 41" in texts[1]


KILLED = """
import sys
from pathlib import Path
from test_machine_program import make_test_renderer, play_task, terminal_client

url, folder = sys.argv[1], Path(sys.argv[2])
client = terminal_client(url, folder / "state", lease_s=20)
play_task(client, make_test_renderer(), folder / "task", ["sleep 54321"])
"""


@pytest.mark.long
def test_a_killed_run_leaves_no_process_in_the_machine(dockerd: DockerHost, tmp_path: Path) -> None:
    write_task(tmp_path / "task", dockerd.image, TESTS)
    words = [sys.executable, "-c", KILLED, dockerd.url, str(tmp_path)]
    api = docker.APIClient(base_url=dockerd.url, version="auto")

    def programs() -> list[str]:
        """Return the processes of the program in all machines."""
        containers = api.containers(filters={"label": MACHINE_LABEL})
        processes = [row[-1] for container in containers for row in api.top(container["Id"])["Processes"]]
        return [process for process in processes if "agent.py" in process or "sleep 54321" in process]

    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}) as run:
        wait_until(lambda: any(process.startswith("sleep") for process in programs()))
        run.kill()
    wait_until(lambda: not programs())
    assert api.containers(filters={"label": MACHINE_LABEL}), "the machine itself has its lease"
    wait_until(lambda: not api.containers(all=True, filters={"label": MACHINE_LABEL}))
    api.close()
