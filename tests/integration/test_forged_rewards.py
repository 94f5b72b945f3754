"""Forged rewards: each attack succeeds in shared mode, and none in separate mode."""

import asyncio
import importlib.util
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import docker.types
import pytest
from dockerd import DockerHost

from agentrl.config.containers import ContainersConfig
from agentrl.containers.grading import CARRIED_BYTES, OUTPUT_BYTES, Grade, GradingMode, grade
from agentrl.containers.leases import LeaseLabels
from agentrl.containers.machine import Command, Machine, MachineEndedError
from agentrl.containers.machines import Machines
from agentrl.containers.options import API_VERSION
from agentrl.containers.spec import MachineSpec, ServiceSpec
from agentrl.containers.task_folder import load_task_folder
from tests.fake_machine import write_task
from tests.forgery.attacks import (
    FURTHER,
    IMAGE_FILES,
    LARGE,
    LARGE_FOLDER,
    PACKAGES,
    PUBLIC,
    PYTHON,
    TEST_FILES,
    WHOLE,
    WORK,
    Attack,
    group_script,
    write,
)

pytestmark = pytest.mark.slow

IMAGE = "agentrl-forgery:test"
FIND_DAEMONS = """
import os, socket, stat, sys
found = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:] if len(line.split()) > 7]
found += [sys.argv[1], "/run/containerd/containerd.sock"]
for folder, _, names in os.walk("/"):
    if not folder.startswith(("/proc", "/sys")):
        found += [f"{folder.rstrip('/')}/{name}" for name in names]
for path in dict.fromkeys(found):
    try:
        if path.startswith("@") or stat.S_ISSOCK(os.stat(path).st_mode):
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(5)
            client.connect(path.replace("@", chr(0), 1) if path.startswith("@") else path)
            client.send(b"GET /version HTTP/1.0\\r\\n\\r\\n")
            if b"HTTP/1" in client.recv(100):
                print(path)
    except OSError:
        pass
print("searched")
"""
"""Prints the sockets on which something answers HTTP, of all that a container has."""
MODES: tuple[GradingMode, ...] = ("shared", "separate")
TOOLS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")


Result = TypeVar("Result")


def in_machines(dockerd: DockerHost, state: Path, body: Callable[[Machines], Awaitable[Result]]) -> Result:
    async def main() -> Result:
        async with Machines(ContainersConfig(hosts=(dockerd.url,), state=state), "forgery") as machines:
            return await body(machines)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def image(dockerd: DockerHost, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with pytest, and the task's files."""
    packages = tmp_path_factory.mktemp("packages")
    for tool in TOOLS:
        spec = importlib.util.find_spec(tool)
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin)
        source = file.parent if file.name == "__init__.py" else file
        (packages / source.name).symlink_to(source)

    async def make(machines: Machines) -> None:
        async with await machines.open(MachineSpec(image=dockerd.image, network="no-network"), "image") as machine:
            await machine.upload(packages, PACKAGES)
            await machine.upload({name: text.encode() for name, text in IMAGE_FILES.items()}, "/app")
            # Compiled here, and not in each machine again.
            await machine.run(Command(f"cd /tmp && {PYTHON} -m pytest -q -p no:cacheprovider", wall_s=300))
            # Not a snapshot of the machine's: that would end with its owner.
            repository, tag = IMAGE.split(":")
            await machine.client.call(lambda api: api.commit(machine.container, repository, tag, conf={"Labels": {}}))

    in_machines(dockerd, tmp_path_factory.mktemp("state"), make)
    return IMAGE


def open_clean(machines: Machines, spec: MachineSpec, key: str) -> Callable[[], Awaitable[Machine]]:
    return lambda: machines.open(spec, key)


async def grade_attacks(
    machines: Machines, folder: Path, attacks: tuple[Attack, ...], mode: GradingMode, image: str
) -> Grade:
    spec = MachineSpec(image=image, workdir="/app", network="no-network")
    async with await machines.open(spec, f"{folder.name}-{mode}") as machine:
        script = "\n".join(f"( {attack.agent}\n)" for attack in attacks)
        result = await machine.run(Command(script, cwd="/", wall_s=300))
        assert result.exit_code == 0, result.output
        clean = open_clean(machines, spec, f"{folder.name}-clean")
        return await grade(load_task_folder(folder), 0, machine, clean, mode=mode)


def check_attacks(
    dockerd: DockerHost, folder: Path, attacks: tuple[Attack, ...], image: str, artifacts: str = ""
) -> Grade:
    """Check that attacks succeed in shared mode, and not in separate mode, and return the grade of that."""
    names = [attack.name for attack in attacks]

    async def body(machines: Machines) -> Grade:
        task = write_task(
            folder / "group", image, group_script((*attacks, WORK)), tests=TEST_FILES, toml=f"artifacts = [{artifacts}]"
        )
        forged, honest = await asyncio.gather(
            *(grade_attacks(machines, task, (*attacks, WORK), mode, image) for mode in MODES)
        )
        assert forged.rewards == {**dict.fromkeys(names, 1.0), "work": 1.0}, forged.output
        assert forged.forgeable
        assert honest.rewards == {**dict.fromkeys(names, 0.0), "work": 1.0}, honest.output
        assert not honest.forgeable
        return honest

    return in_machines(dockerd, folder / "state", body)


def test_public_attacks(dockerd: DockerHost, tmp_path: Path, image: str) -> None:
    check_attacks(dockerd, tmp_path, PUBLIC, image)


@pytest.mark.long
def test_further_attacks(dockerd: DockerHost, tmp_path: Path, image: str) -> None:
    check_attacks(dockerd, tmp_path, FURTHER, image)


@pytest.mark.long
@pytest.mark.parametrize("attack", LARGE, ids=[attack.name for attack in LARGE])
def test_large_artifacts(dockerd: DockerHost, tmp_path: Path, image: str, attack: Attack) -> None:
    root = f"{LARGE_FOLDER}/{attack.name}"
    before = peak_memory()
    honest = check_attacks(dockerd, tmp_path, (attack,), image, f'"/app", "{root}"')
    assert list(honest.refused) == [root]
    assert peak_memory() - before < 2 * CARRIED_BYTES, "the grader holds no more than it may carry"


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.long
@pytest.mark.parametrize("attack", WHOLE, ids=[attack.name for attack in WHOLE])
def test_attacks_on_the_reward_file(dockerd: DockerHost, tmp_path: Path, image: str, attack: Attack) -> None:
    async def body(machines: Machines) -> None:
        task = write_task(tmp_path / "task", image, f"#!/bin/sh\n{attack.check}\n")
        assert (await grade_attacks(machines, task, (attack,), "shared", image)).rewards == {"reward": 1.0}
        assert (await grade_attacks(machines, task, (attack,), "separate", image)).rewards == {"reward": 0.0}

    in_machines(dockerd, tmp_path / "state", body)


@pytest.mark.long
def test_tests_that_print_what_a_program_prints_without_end(dockerd: DockerHost, tmp_path: Path, image: str) -> None:
    """A limit of the command holds this in both modes; the control is a program that ends."""

    async def body(machines: Machines) -> None:
        for number, (program, is_endless) in enumerate({"exec yes": True, "echo yes": False}.items()):
            task = write_task(
                tmp_path / f"task{number}", image, "#!/bin/sh\n/app/program\nprintf 1 > /logs/verifier/reward.txt\n"
            )
            agent = write("/app/program", f"#!/bin/sh\n{program}\n") + "chmod +x /app/program"
            for mode in MODES:
                result = await grade_attacks(machines, task, (Attack("flood", agent, ""),), mode, image)
                assert result.at_limit == is_endless
                assert result.rewards == ({} if is_endless else {"reward": 1.0})
                assert len(result.output) <= OUTPUT_BYTES + 100

    in_machines(dockerd, tmp_path / "state", body)


@pytest.mark.long
def test_a_compressed_bomb_fills_no_more_than_the_machine_of_the_tests(
    dockerd: DockerHost, tmp_path: Path, image: str
) -> None:
    """It is carried as the small file that it is. The control is a machine with the disk for it."""
    script = (
        "#!/bin/sh\ngzip -dc /app/bomb.gz > /unpacked && [ $(stat -c %s /unpacked) = 200000000 ] && score=1 || score=0\n"
        "rm /unpacked; printf $score > /logs/verifier/reward.txt\n"
    )

    async def body(machines: Machines) -> None:
        task = load_task_folder(write_task(tmp_path / "task", image, script))
        large = MachineSpec(image=image, workdir="/app", network="no-network")
        async with await machines.open(large, "agent") as machine:
            await machine.run(Command("head -c 200000000 /dev/zero | gzip -9 > /app/bomb.gz"))
            through = await grade(task, 0, machine, open_clean(machines, large, "large"), is_last=False)
            assert through.rewards == {"reward": 1.0}
            small = open_clean(machines, large.model_copy(update={"disk_mb": 64}), "small")
            outcome: Grade | MachineEndedError
            try:
                outcome = await grade(task, 0, machine, small)
            except MachineEndedError as error:  # the look at sizes came before the tests had ended
                outcome = error
            assert outcome.is_by_policy if isinstance(outcome, MachineEndedError) else outcome.rewards["reward"] == 0.0

    in_machines(dockerd, tmp_path / "state", body)


def test_no_socket_of_the_daemon_is_in_a_machine(dockerd: DockerHost, tmp_path: Path) -> None:
    """Through a daemon's socket an agent could write the rewards in any machine. The control is a container that has it."""

    async def body(machines: Machines) -> None:
        path = dockerd.url.removeprefix("unix://")
        assert Path(path).is_socket()
        service = ServiceSpec(name="side", image=dockerd.image, command=("sleep", "1000"))
        spec = MachineSpec(image=dockerd.image, network="no-network", services=(service,))
        async with await machines.open(spec, "agent") as machine:
            command = Command(("python3", "-c", FIND_DAEMONS, path))
            sides = [machine, await machine.service("side")]
            assert [(await side.run(command)).output for side in sides] == ["searched\n"] * 2
            listed = (await machine.run(Command("cat /proc/self/mountinfo"))).output
            points = {line.split()[4] for line in listed.splitlines()}
            own = {point for point in points if not point.startswith(("/proc", "/sys", "/dev"))}
            assert own == {"/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
            options = {
                "image": dockerd.image,
                "command": ["sleep", "1000"],
                "labels": LeaseLabels(machine.id, "forgery", "control", machines.hosts[0].lease.expires).labels(
                    "service"
                ),
                "host_config": docker.types.HostConfig(
                    version=API_VERSION, network_mode="none", binds=[f"{path}:/run/docker.sock"]
                ),
            }
            created = await machine.client.call(lambda api: api.create_container(name="forgery-control", **options))
            await machine.client.call(lambda api: api.start(created["Id"]))
            control = Machine(machine.client, created["Id"], "control", spec, tmp_path / "state", machines)
            assert (await control.run(command)).output == "/run/docker.sock\nsearched\n"

    in_machines(dockerd, tmp_path / "state", body)
