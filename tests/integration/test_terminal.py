"""Episodes of the environment `terminal`, with the tool in this process and machines of a real daemon."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl_envs.terminal import TerminalEnv
from agentrl_tools.terminal import TerminalService
from dockerd import DockerHost

from agentrl.core.task import Task
from agentrl.core.tool import ToolClient
from agentrl.core.types import Message
from agentrl.testing import play_episode
from tests.fake_machine import write_task

SCRIPT = """#!/bin/sh
[ "$(cat /app/answer.txt)" = 42 ] && score=1 || score=0
printf $score > /logs/verifier/reward.txt
"""


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
            "<bash>echo 42 > answer.txt</bash>",
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
    reward, metrics, _ = play(
        client, task, ["<bash>echo 42 > answer.txt</bash>", "<bash>echo more</bash>"], max_turns=2
    )
    assert reward == 1.0, "an episode that a limit ends is graded, too"
