"""Kills for lack of memory in a container: by the kernel's count, also when the cgroup goes with the container."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.sandbox.cgroup import parse_mounts
from agentrl.sandbox.docker.container import MemoryKills, machine_oom_kills, oom_file

CONTAINER = "c0ffee" * 10


@pytest.mark.parametrize(
    ("mounts", "groups", "expected"),
    [
        (
            "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0",
            f"0::/system.slice/docker-{CONTAINER}.scope",
            f"/sys/fs/cgroup/system.slice/docker-{CONTAINER}.scope/memory.events",
        ),
        (
            "cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n"
            "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n"
            "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0",
            f"8:pids:/docker/{CONTAINER}\n4:memory:/docker/{CONTAINER}\n0::/docker/{CONTAINER}",
            f"/sys/fs/cgroup/memory/docker/{CONTAINER}/memory.oom_control",
        ),
        # A process of the same id on this machine, while the container runs on another one.
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", "0::/user.slice", None),
        # As seen from a container: its own group is the root.
        ("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0", "0::/", None),
    ],
    ids=["version 2", "version 1 with an empty version 2", "another process", "no name"],
)
def test_where_memory_kills_are_counted(mounts: str, groups: str, expected: str | None) -> None:
    actual = oom_file(groups, parse_mounts(mounts), CONTAINER)
    assert actual == (None if expected is None else Path(expected))


class Container:
    """A process, and a file in place of its cgroup's."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.file = file
        self.kill_count = 0
        self.add_kill(0)

    def add_kill(self, kills: int = 1) -> None:
        self.kill_count += kills
        self.file.write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {self.kill_count}\n")

    async def end(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        for _ in range(3):  # the event loop notices it in its next round
            await asyncio.sleep(0)


async def never_asked() -> int:
    raise AssertionError("the daemon's reports do not matter")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Container]:
    container = Container(tmp_path / "memory.oom_control")
    monkeypatch.setattr("agentrl.sandbox.docker.container._oom_file", lambda name, pid: container.file)
    yield container
    container.process.kill()
    container.process.communicate()


@pytest.mark.parametrize("earlier", [0, 1, 2])
@pytest.mark.parametrize("last", [0, 1])
def test_the_kernels_count_at_the_end_decides(container: Container, earlier: int, last: int) -> None:
    """Whatever the daemon says: OOMKilled stays true from the first kill on."""

    async def main() -> None:
        kills = MemoryKills(CONTAINER, container.process.pid)
        kills.watch()
        container.add_kill(earlier)
        assert kills.count() == earlier
        container.add_kill(last)
        await container.end()
        container.file.unlink()
        await kills.count_end(True, never_asked)
        assert kills.count() == earlier + last
        kills.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("earlier", "oom_killed", "on_machine", "reported", "counted"),
    [
        (0, False, 1, 0, 0),
        (0, True, 1, 1, 1),
        (1, True, 1, 2, 2),
        (1, True, 0, 2, 1),  # the daemon has reported the earlier kill twice
        (1, True, 1, 1, 1),  # a process of something else was killed
    ],
)
def test_a_cgroup_that_is_gone_too_early(
    container: Container,
    monkeypatch: pytest.MonkeyPatch,
    earlier: int,
    oom_killed: bool,
    on_machine: int,
    reported: int,
    counted: int,
) -> None:
    """After an earlier kill there was another only if both the kernel's count of the machine and the reports say so."""

    async def reports() -> int:
        return reported

    async def main() -> None:
        monkeypatch.setattr("agentrl.sandbox.docker.container.machine_oom_kills", lambda: 100)
        kills = MemoryKills(CONTAINER, container.process.pid)
        kills.watch()
        container.add_kill(earlier)
        assert kills.count() == earlier
        container.file.unlink()
        await container.end()
        monkeypatch.setattr("agentrl.sandbox.docker.container.machine_oom_kills", lambda: 100 + on_machine)
        for _ in range(2):
            await kills.count_end(oom_killed, reports)
            assert kills.count() == counted
        kills.close()

    asyncio.run(main())


@pytest.mark.parametrize("oom_killed", [False, True])
def test_of_a_container_on_another_machine_only_the_end_is_known(oom_killed: bool) -> None:
    async def main() -> None:
        kills = MemoryKills(CONTAINER, 1)
        kills.watch()
        assert kills.count() == 0
        await kills.count_end(oom_killed, never_asked)
        assert kills.count() == oom_killed
        kills.close()

    asyncio.run(main())


def test_the_machines_kills_are_a_number() -> None:
    assert machine_oom_kills() >= 0
    assert "\noom_kill " in Path("/proc/vmstat").read_text()
