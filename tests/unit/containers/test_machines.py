"""Machines at daemons that are fakes: where they are opened, how many, and what is left of those who held them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from deadlines import until, wait_until

from agentrl.cli.main import main as command_line
from agentrl.config.containers import ContainersConfig
from agentrl.containers import machines as machines_module
from agentrl.containers import reaper
from agentrl.containers.leases import reap
from agentrl.containers.machine import MachineEndedError
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import MissingError, SandboxFailure
from tests.fake_daemon import FakeDaemon, fake_daemon

SPEC = MachineSpec(image="image", network="no-network")


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not below the tests' own temporary folder: the path of a socket has 108 bytes at most.
    path = Path(tempfile.mkdtemp(prefix="agentrl-fake-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemons(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDaemon]]:
    """Two; what their reapers would do is done by tests."""
    monkeypatch.setattr("agentrl.containers.host.ensure_reaper", lambda url, state: None)
    with ExitStack() as exits:
        yield [exits.enter_context(fake_daemon(folder / f"{number}.sock")) for number in range(2)]


def configure(daemons: list[FakeDaemon], folder: Path, **keys: Any) -> ContainersConfig:
    return ContainersConfig(hosts=tuple(daemon.url for daemon in daemons), state=folder / "state", **keys)


def run(episode: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(episode())


def test_a_machine_goes_to_the_daemon_with_the_fewest(daemons: list[FakeDaemon], folder: Path) -> None:
    config = configure(daemons, folder, machines=3)

    async def main() -> None:
        async with Machines(config, "run") as machines:
            await asyncio.gather(*(machines.open(SPEC, f"first {number}") for number in range(2)))
            for number in range(4):
                await machines.open(SPEC, str(number))
                counts = sorted(len(daemon.containers) for daemon in daemons)
                assert sum(counts) == number + 3
            assert counts == [3, 3]
            full = Machines(config.model_copy(update={"wait_s": 0.01}), "other")
            await full.start()
            with pytest.raises(SandboxFailure, match=r"3 are in use at each of unix:.*0\.sock, unix:.*1\.sock"):
                await full.open(SPEC, "waits")
            await full.close()
        assert [daemon.machines for daemon in daemons] == [[], []]
        assert [daemon.volumes for daemon in daemons] == [{}, {}]

    run(main)


def test_a_lost_daemon_is_named_and_used_again(
    daemons: list[FakeDaemon], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machines_module, "LOST_S", 0.01)
    first, second = daemons

    async def main() -> None:
        async with Machines(configure(daemons, folder), "run") as machines:
            lost = await machines.open(SPEC, "a")
            lost_daemon, other = (first, second) if first.containers else (second, first)
            lost_daemon.stop()
            with pytest.raises(SandboxFailure, match=f"{lost_daemon.url} does not answer"):
                await lost.check()
            again = await machines.open(SPEC, "a")
            assert not again.is_adopted, "its machine is lost, and a new one is at the other daemon"
            assert again.client.url == other.url
            assert f"{lost_daemon.url} does not answer" in caplog.text
            await machines.open(SPEC, "b")
            assert sorted(other.machines) == ["a", "b"]
            lost_daemon.start()
            await until(lambda: f"{lost_daemon.url} answers again" in caplog.text)
            await machines.open(SPEC, "c")
            assert lost_daemon.machines == ["a", "c"]
            other.stop()
            lost_daemon.stop()
            with pytest.raises(SandboxFailure, match=r"no Docker daemon of containers\.hosts answers"):
                await machines.open(SPEC, "d")
            lost_daemon.start()
            await machines.open(SPEC, "d")
            assert lost_daemon.machines == ["a", "c", "d"], "it is tried at once if there is no other"

    run(main)


def test_a_daemon_that_comes_later_is_used(
    daemons: list[FakeDaemon], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machines_module, "LOST_S", 0.01)
    late, other = daemons
    late.stop()

    async def main() -> None:
        async with Machines(configure(daemons, folder), "run") as machines:
            assert f"no Docker daemon answers at {late.url}" in caplog.text
            await machines.open(SPEC, "a")
            late.start()
            await until(lambda: f"{late.url} answers again" in caplog.text)
            await machines.open(SPEC, "b")
            assert (late.machines, other.machines) == (["b"], ["a"])
            assert late.volumes, "it has a lease there"
        late.stop()
        other.stop()
        with pytest.raises(MissingError, match="no Docker daemon answers"):
            await Machines(configure(daemons, folder), "run").start()

    run(main)


def test_a_runtime_that_a_daemon_lacks_is_named(daemons: list[FakeDaemon], folder: Path) -> None:
    daemons[0].runtimes = ("runc", "runsc")

    async def main() -> None:
        config = configure(daemons, folder, runtime="runsc")
        with pytest.raises(
            MissingError, match=f"runtime=runsc, but the Docker daemon at {daemons[1].url} has only runc"
        ):
            await Machines(config, "run").start()
        assert [daemon.volumes for daemon in daemons] == [{}, {}]

    run(main)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"MemoryLimit": False}, "memory"),
        ({"Rootless": True, "CgroupVersion": "1"}, "memory, processes, CPU time"),
    ],
)
def test_a_daemon_that_cannot_limit_is_refused(
    daemons: list[FakeDaemon], folder: Path, fields: dict[str, Any], names: str
) -> None:
    daemons[0].info_fields = fields

    async def main() -> None:
        with pytest.raises(MissingError, match=f"{daemons[0].url} cannot limit {names}: it needs cgroups"):
            await Machines(configure(daemons, folder), "run").start()

    run(main)


def test_ls_and_rm_over_both_daemons(
    daemons: list[FakeDaemon], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    hosts = [word for daemon in daemons for word in ("--host", daemon.url)]

    async def main() -> None:
        machines = Machines(configure(daemons, folder), "run")
        await machines.start()
        for key in "abc":
            await machines.open(SPEC, key)
        await machines.leave()

    run(main)
    command_line(["containers", "ls", *hosts])
    printed = capsys.readouterr().out
    assert all(daemon.url in printed for daemon in daemons)
    command_line(["containers", "rm", "run/a", *hosts])
    assert sorted(daemons[0].machines + daemons[1].machines) == ["b", "c"]
    command_line(["containers", "rm", "run", *hosts])
    assert [daemon.machines for daemon in daemons] == [[], []]


def test_a_lease_that_was_left_goes_with_its_last_machine(daemons: list[FakeDaemon], folder: Path) -> None:
    import docker

    daemon = daemons[0]

    async def main() -> None:
        left = Machines(configure(daemons[:1], folder), "run")
        await left.start()
        await left.open(SPEC, "a")
        await left.leave()
        api = docker.APIClient(base_url=daemon.url, version="1.41")
        assert reap(api).next_end is not None
        assert len(daemon.volumes) == 1, "the machine is kept"
        async with Machines(configure(daemons[:1], folder), "run") as machines:
            assert (await machines.open(SPEC, "a")).is_adopted
            assert reap(api).next_end is not None
        assert reap(api).next_end is None, "nothing is left long before the time to live, and the reaper ends"
        assert daemon.volumes == {}
        api.close()

    run(main)


def test_a_machine_of_tests_has_the_place_of_the_one_that_it_grades(daemons: list[FakeDaemon], folder: Path) -> None:
    daemon = daemons[0]

    async def main() -> None:
        config = configure(daemons[:1], folder, machines=2, wait_s=0.01)
        async with Machines(config, "run") as machines:
            episodes = [await machines.open(SPEC, key) for key in "ab"]
            tests = [await machines.open(SPEC, f"{episode.id}-tests", beside=episode) for episode in episodes]
            names = [container["Names"][0] for container in daemon.containers.values()]
            assert sorted(names) == [f"/agentrl-machine-{name}" for name in ("0", "0-tests", "1", "1-tests")]
            assert (await machines.open(SPEC, f"{episodes[0].id}-tests", beside=episodes[0])) is tests[0]
            with pytest.raises(SandboxFailure, match="no machine is free"):
                await machines.open(SPEC, "c")
            await episodes[0].close()  # as if its machine of tests had been left by a process that was killed
            successor = await machines.open(SPEC, "c")
            await machines.open(SPEC, "tests of c", beside=successor)
            assert "tests of c" in daemon.machines
            assert f"{episodes[0].id}-tests" not in daemon.machines
            with pytest.raises(MachineEndedError, match="was removed"):
                await machines.open(SPEC, "tests of a", beside=episodes[0])

    run(main)


HOLDER = """
import asyncio, sys
from pathlib import Path
from agentrl.config.containers import ContainersConfig
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec

async def main(url, state, owner):
    machines = Machines(ContainersConfig(hosts=(url,), state=Path(state), machines=5, lease_s=2), owner)
    await machines.start()
    for number in range(4):
        await machines.open(MachineSpec(image="image", network="no-network"), str(number))
        print(number, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_processes_never_hold_more_than_the_bound_also_after_a_kill(folder: Path) -> None:
    with fake_daemon(folder / "docker.sock") as daemon, ExitStack() as exits:
        processes = []
        for owner in "ab":
            words = [sys.executable, "-c", HOLDER, daemon.url, str(folder / "state"), owner]
            process = exits.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, env=dict(os.environ)))
            exits.callback(process.kill)
            processes.append(process)
        wait_until(lambda: len(daemon.containers) == 5)
        held = [container["Labels"]["agentrl.owner"] for container in daemon.containers.values()]
        victim, survivor = ("a", "b") if held.count("a") > 1 else ("b", "a")
        processes["ab".index(victim)].send_signal(signal.SIGKILL)
        # Its lease ends, the reaper removes what it held, and the other one has the rest of its four.
        wait_until(
            lambda: [container["Labels"]["agentrl.owner"] for container in daemon.containers.values()] == [survivor] * 4
        )
        assert daemon.most_machines == 5
        processes["ab".index(survivor)].send_signal(signal.SIGKILL)
        wait_until(lambda: not daemon.containers and not daemon.volumes)
        lock = reaper._lock_file(daemon.url, folder / "state")
        wait_until(lambda: not reaper._is_running(lock))
