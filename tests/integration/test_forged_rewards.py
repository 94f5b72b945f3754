"""Forged rewards: each attack succeeds in shared mode, and none in separate mode."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from dockerd import DockerHost

from agentrl.config.containers import ContainersConfig
from agentrl.containers.grading import Grade, GradingMode, grade
from agentrl.containers.machine import Command, Machine
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.containers.task_folder import load_task_folder
from tests.fake_machine import write_task
from tests.forgery.attacks import FURTHER, IMAGE_FILES, PACKAGES, PUBLIC, TEST_FILES, WHOLE, WORK, Attack, group_script

IMAGE = "agentrl-forgery:test"
TOOLS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


def in_machines(dockerd: DockerHost, state: Path, body: Callable[[Machines], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Machines(ContainersConfig(hosts=(dockerd.url,), state=state), "forgery") as machines:
            await body(machines)

    asyncio.run(main())


@pytest.fixture(scope="module")
def image(dockerd: DockerHost, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with pytest, and the task's files."""

    async def make(machines: Machines) -> None:
        async with await machines.open(MachineSpec(image=dockerd.image, network="no-network"), "image") as machine:
            for tool in TOOLS:
                spec = importlib.util.find_spec(tool)
                assert spec is not None
                assert spec.origin is not None
                file = Path(spec.origin)
                is_package = file.name == "__init__.py"
                await machine.upload(
                    file.parent if is_package else file, f"{PACKAGES}/{tool}{'' if is_package else '.py'}"
                )
            await machine.upload({name: text.encode() for name, text in IMAGE_FILES.items()}, "/app")
            # Not a snapshot of the machine's: that would end with its owner.
            repository, tag = IMAGE.split(":")
            await machine.client.call(lambda api: api.commit(machine.container, repository, tag, conf={"Labels": {}}))

    in_machines(dockerd, tmp_path_factory.mktemp("state"), make)
    return IMAGE


async def grade_attacks(
    machines: Machines, folder: Path, attacks: tuple[Attack, ...], mode: GradingMode, image: str
) -> Grade:
    spec = MachineSpec(image=image, workdir="/app", network="no-network")

    async def open_clean() -> Machine:
        return await machines.open(spec, f"{folder.name}-clean")

    async with await machines.open(spec, f"{folder.name}-{mode}") as machine:
        script = "\n".join(f"( {attack.agent}\n)" for attack in attacks)
        result = await machine.run(Command(script, cwd="/"))
        assert result.exit_code == 0, result.output
        return await grade(load_task_folder(folder), 0, machine, open_clean, mode=mode)


def check_attacks(dockerd: DockerHost, folder: Path, attacks: tuple[Attack, ...], image: str) -> None:
    async def body(machines: Machines) -> None:
        task = write_task(folder / "group", image, group_script((*attacks, WORK)), tests=TEST_FILES)
        forged = await grade_attacks(machines, task, (*attacks, WORK), "shared", image)
        assert forged.rewards == {**dict.fromkeys([attack.name for attack in attacks], 1.0), "work": 1.0}, forged.output
        assert forged.forgeable
        honest = await grade_attacks(machines, task, (*attacks, WORK), "separate", image)
        assert honest.rewards == {**dict.fromkeys([attack.name for attack in attacks], 0.0), "work": 1.0}, honest.output
        assert not honest.forgeable

    in_machines(dockerd, folder / "state", body)


def test_public_attacks(dockerd: DockerHost, tmp_path: Path, image: str) -> None:
    check_attacks(dockerd, tmp_path, PUBLIC, image)


@pytest.mark.long
def test_further_attacks(dockerd: DockerHost, tmp_path: Path, image: str) -> None:
    check_attacks(dockerd, tmp_path, FURTHER, image)


@pytest.mark.long
@pytest.mark.parametrize("attack", WHOLE, ids=[attack.name for attack in WHOLE])
def test_attacks_on_the_reward_file(dockerd: DockerHost, tmp_path: Path, image: str, attack: Attack) -> None:
    async def body(machines: Machines) -> None:
        task = write_task(tmp_path / "task", image, f"#!/bin/sh\n{attack.check}\n")
        assert (await grade_attacks(machines, task, (attack,), "shared", image)).rewards == {"reward": 1.0}
        assert (await grade_attacks(machines, task, (attack,), "separate", image)).rewards == {"reward": 0.0}

    in_machines(dockerd, tmp_path / "state", body)
