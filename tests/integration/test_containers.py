"""Machines on a real Docker daemon."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from dockerd import DockerHost

from agentrl.config.containers import ContainersConfig
from agentrl.containers.machine import Command, Machine
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec


def play(dockerd: DockerHost, state: Path, episode: Callable[[Machine], Awaitable[None]]) -> None:
    async def main() -> None:
        config = ContainersConfig(hosts=(dockerd.url,), state=state)
        spec = MachineSpec(image=dockerd.image, network="no-network", processes=64)
        async with Machines(config, "test") as machines, await machines.open(spec, "key") as machine:
            await episode(machine)

    asyncio.run(main())


def test_commands_and_files(dockerd: DockerHost, tmp_path: Path) -> None:
    async def episode(machine: Machine) -> None:
        assert (await machine.run(Command("echo out; echo err >&2; exit 3"))).exit_code == 3
        assert (await machine.run(Command(("no-such-program",)))).exit_code == 126
        await machine.upload({"a/b.txt": b"hello"}, "/made/folder", owner="nobody")
        listed = await machine.run(Command("stat -c %U /made/folder/a/b.txt; cat b.txt", cwd="/made/folder/a"))
        assert listed.output == "nobody\nhello"
        await machine.run(Command("ln -s /etc/passwd leak; ln -s b.txt inner; mkfifo pipe", cwd="/made/folder/a"))
        download = await machine.download("/made/folder")
        assert download.files() == {"folder/a/b.txt": b"hello"}
        assert set(download.left_out) == {"folder/a/leak", "folder/a/pipe"}

    play(dockerd, tmp_path, episode)


def test_limits_end_commands_with_all_that_they_started(dockerd: DockerHost, tmp_path: Path) -> None:
    async def episode(machine: Machine) -> None:
        await machine.run(Command("sleep 1001 &"))
        late = await machine.run(Command("setsid sleep 1002 & (env -i setsid sleep 1003 &) ; sleep 1004", wall_s=0.5))
        assert late.timed_out
        assert late.exit_code is None
        processes = (await machine.run(Command("ps ax"))).output
        assert [number for number in range(1001, 1005) if f"sleep {number}" in processes] == [1001]
        flood = await machine.run(Command("yes", output_bytes=1000))
        assert flood.flooded
        assert len(flood.output) < 1100

    play(dockerd, tmp_path, episode)


def test_a_call_is_run_once(dockerd: DockerHost, tmp_path: Path) -> None:
    async def episode(machine: Machine) -> None:
        command = Command("echo x >> /calls; cat /calls", call_id="7")
        results = await asyncio.gather(machine.run(command), machine.run(command))
        assert results[0] == results[1] == await machine.run(command)
        assert results[0].output == "x\n"

    play(dockerd, tmp_path, episode)
