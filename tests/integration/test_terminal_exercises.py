"""The shipped exercises in machines: reward 1 of each solution, and 0 of an agent that does nothing, as in Harbor."""

import asyncio
from functools import partial
from pathlib import Path

import docker
import pytest
from agentrl_tasks.terminal.data import SHIPPED
from agentrl_tasks.terminal.exercise import IMAGE
from dockerd import DockerHost

from agentrl.config.containers import ContainersConfig
from agentrl.containers.grading import grade
from agentrl.containers.machine import Command
from agentrl.containers.machines import Machines
from agentrl.containers.task_folder import SOLUTION, SOLVE_SCRIPT, find_task_folders, load_task_folder
from agentrl.containers.task_machines import machine_spec


@pytest.mark.long
@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in find_task_folders(SHIPPED)])
def test_solutions_have_reward_1_and_an_idle_agent_0(folder: Path, dockerd: DockerHost, tmp_path: Path) -> None:
    client = docker.APIClient(base_url=dockerd.url)
    repository, tag = IMAGE.split(":")
    client.tag(dockerd.image, repository, tag)
    client.close()
    assert asyncio.run(rewards(folder, ContainersConfig(hosts=(dockerd.url,), state=tmp_path))) == [0.0, 1.0]


async def rewards(folder: Path, config: ContainersConfig) -> list[float]:
    """Return the reward without and with the solution."""
    task = load_task_folder(folder)
    agent_spec, tests_spec = await machine_spec(task), await machine_spec(task, 0)
    graded = []
    async with Machines(config, "exercises") as machines:
        for solves in (False, True):
            open_clean = partial(machines.open, tests_spec, f"clean-{solves}")

            async with await machines.open(agent_spec, f"agent-{solves}") as machine:
                if solves:
                    solution = task.steps[0].solution
                    assert solution is not None
                    await machine.upload(solution, SOLUTION, mode=0o755)
                    result = await machine.run(Command(SOLVE_SCRIPT))
                    assert result.exit_code == 0, result.output
                grade_of_step = await grade(task, 0, machine, open_clean)
                assert not grade_of_step.forgeable
                graded.append(grade_of_step.rewards["reward"])
    return graded
