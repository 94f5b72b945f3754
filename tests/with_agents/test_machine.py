"""mini-swe-agent, unmodified, works in machines of shipped container tasks, whose tests grade it."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import docker
import pytest
from agent_image import AGENT, program_files
from agentrl_envs.terminal import TerminalEnv
from agentrl_tasks.terminal.data import SHIPPED
from agentrl_tasks.terminal.exercise import IMAGE
from agentrl_tools.terminal import TerminalService
from dockerd import DockerHost
from harness_cases import CASES, call, check_rollout
from program_episodes import play_program

from agentrl import Message, Task
from agentrl.config.agent import AgentConfig
from agentrl.core.tool import ToolClient
from agentrl.data.task_folders import read_task_folder
from agentrl.render.renderer import ChatRenderer

pytestmark = [pytest.mark.agents, pytest.mark.parametrize("bin_folder", ["mini_swe_agent"], indirect=True)]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FIX = "sed -i 's,    return .*,    return sum(values) / len(values),' window.py"
CONFIG = AgentConfig(
    harness="mini_swe_agent",
    sandbox="container",
    reward="environment",
    env={"PATH": f"{AGENT}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
)
(CASE,) = (case for case in CASES if case.harness == "mini_swe_agent")


@pytest.fixture
def client(dockerd: DockerHost, bin_folder: Path, tmp_path: Path) -> Iterator[ToolClient]:
    """The tool `terminal`, at a daemon where the image of the exercises has mini-swe-agent."""
    api = docker.APIClient(base_url=dockerd.url, timeout=300)
    repository, tag = IMAGE.split(":")
    container = api.create_container(dockerd.image, command="true")
    api.put_archive(container, "/", program_files(CASE, bin_folder))
    api.commit(container, repository=repository, tag=tag)
    api.remove_container(container)
    containers = {"hosts": [dockerd.url], "state": str(tmp_path / "state")}
    client = TerminalService().local_client({}, {"containers": containers})
    yield client
    asyncio.run(client.aclose())
    api.remove_image(IMAGE, force=True)
    api.close()


def shipped_task(name: str) -> Task:
    row = read_task_folder(SHIPPED / name)
    metadata = row["metadata"]
    assert isinstance(metadata, dict)
    return Task(name, (Message("user", str(row["prompt"])),), metadata=metadata)


EPISODES = (
    ("count_lines-0", ("ls", "grep -c ERROR cup.log > answer.txt", "cat answer.txt", SUBMIT), 1.0),
    ("fix_test-0", ("cat window.py", FIX, "python3 test_window.py", SUBMIT), 1.0),
    ("fix_test-0", (SUBMIT,), 0.0),
)
"""Tasks, with the commands and the reward of an episode."""


def test_mini_swe_agent_works_in_machines_of_tasks(client: ToolClient, renderer: ChatRenderer) -> None:
    for name, commands, reward in EPISODES:
        script = [call("bash", command=command) for command in commands]
        env, clients = partial(TerminalEnv, protocol="program"), {"terminal": client}
        rollout, generations = play_program(CONFIG, script, renderer, task=shipped_task(name), env=env, clients=clients)
        assert rollout.failure is None, rollout.failure
        assert (rollout.reward, rollout.metrics["forgeable"]) == (reward, 0.0), name
        rollout.reward = 1.0  # that of a solved task
        check_rollout(rollout, generations, [(None, "".join(f"{turn}<|im_end|>" for turn in script))], renderer)
        text = renderer.decode(rollout.rows[0].token_ids.tolist())
        assert (SHIPPED / name / "instruction.md").read_text().strip() in text
