"""Machines at two live daemons of which one is killed, with gVisor, and at Podman."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import docker
import psutil
import pytest
from deadlines import until, wait_until
from dockerd import IMAGE, DockerHost, NoDocker, OwnDaemon, image_tar, import_image, own_daemon

from agentrl.cli.main import main as command_line
from agentrl.config.containers import ContainersConfig
from agentrl.containers import machines as machines_module
from agentrl.containers.machine import Command
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import SandboxFailure

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SPEC = MachineSpec(image=IMAGE, network="no-network", processes=64, memory_mb=128)


@pytest.fixture
def second_daemon() -> Iterator[OwnDaemon]:
    try:
        with own_daemon() as daemon:
            import_image(daemon.url)
            yield daemon
    except NoDocker as error:
        pytest.skip(str(error))


def test_a_daemon_that_is_killed_is_named_and_used_again(
    dockerd: DockerHost,
    second_daemon: OwnDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machines_module, "LOST_S", 0.5)
    monkeypatch.setenv("COLUMNS", "300")
    urls = (dockerd.url, second_daemon.url)
    hosts = [word for url in urls for word in ("--host", url)]

    async def main() -> None:
        async with Machines(ContainersConfig(hosts=urls, state=tmp_path, lease_s=60), "run") as machines:
            episodes = [await machines.open(SPEC, key) for key in "abcd"]
            assert sorted(machine.client.url for machine in episodes) == sorted([*urls, *urls])
            await asyncio.to_thread(command_line, ["containers", "ls", *hosts])
            printed = capsys.readouterr().out
            assert all(url in printed for url in urls)
            lost = next(machine for machine in episodes if machine.client.url == second_daemon.url)
            running = asyncio.create_task(lost.run(Command("echo begun > /file; sleep 1000", wall_s=900)))
            await until(lambda: any("begun" in text for text in _files(second_daemon)))
            second_daemon.kill()
            with pytest.raises(SandboxFailure):  # infrastructure, and no result
                await running
            again = await machines.open(SPEC, "episode of the lost one, again")
            assert again.client.url == dockerd.url
            assert (await again.run(Command("echo alive"))).output == "alive\n"
            assert f"{second_daemon.url} does not answer" in caplog.text
            second_daemon.start()
            await until(lambda: f"{second_daemon.url} answers again" in caplog.text)
            back = await machines.open(SPEC, "later")
            assert back.client.url == second_daemon.url
            assert (await back.run(Command("echo alive"))).output == "alive\n"
            await asyncio.to_thread(command_line, ["containers", "rm", "run", *hosts])
            for host in machines.hosts:
                assert not (await host.scan()).machines

    asyncio.run(main())


def _files(daemon: OwnDaemon) -> Iterator[str]:
    for file in daemon.folder.glob("data/overlay2/*/diff/file"):
        with suppress(OSError):
            yield file.read_text()


def test_a_runtime_with_its_own_kernel(tmp_path: Path) -> None:
    """gVisor as Debian has it, without a network of its own, which it needs at a daemon without a bridge."""
    if shutil.which("runsc") is None:
        pytest.skip("runsc is not installed")
    try:
        with own_daemon() as daemon:
            runtimes = {"runsc": {"path": "/usr/bin/runsc", "runtimeArgs": ["--network=none", "--platform=ptrace"]}}
            (daemon.folder / "none.json").write_text(json.dumps({"runtimes": runtimes}))
            assert daemon.process is not None
            daemon.process.send_signal(signal.SIGHUP)
            api = docker.APIClient(base_url=daemon.url, version="auto")
            wait_until(lambda: "runsc" in api.info()["Runtimes"])
            import_image(daemon.url)

            async def main() -> None:
                config = ContainersConfig(hosts=(daemon.url,), state=tmp_path, runtime="runsc")
                async with Machines(config, "run") as machines, await machines.open(SPEC, "a") as machine:
                    release = (await machine.run(Command("uname -r"))).output.strip()
                    assert release
                    assert release != os.uname().release

            asyncio.run(main())
            api.close()
    except NoDocker as error:
        pytest.skip(str(error))


@pytest.fixture
def podman() -> Iterator[str]:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if os.geteuid() != 0:
        pytest.skip("Podman's folders are made for root")
    folder = Path(tempfile.mkdtemp(prefix="agentrl-podman-"))
    (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\nevents_logger = "file"\n')
    url = f"unix://{folder}/podman.sock"
    words = ["podman", f"--root={folder}/root", f"--runroot={folder}/run", f"--tmpdir={folder}/tmp"]
    words += ["--cgroup-manager=cgroupfs", "--storage-driver=overlay"]
    env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
    with (folder / "log").open("wb") as log:
        service = subprocess.Popen([*words, "system", "service", "--time=0", url], stdout=log, stderr=log, env=env)
    try:
        wait_until(lambda: (folder / "podman.sock").exists())
        api = docker.APIClient(base_url=url, version="auto", timeout=120)
        # Podman takes short names for those of docker.io.
        api.import_image_from_file(str(image_tar()), repository=f"docker.io/library/{IMAGE.split(':')[0]}", tag="test")
        api.tag(api.images()[0]["Id"], f"docker.io/library/{IMAGE.split(':')[0]}", "test")
        yield url
        api.close()
    finally:
        subprocess.run([*words, "rm", "--all", "--force", "--time=0"], env=env, check=False, capture_output=True)
        service.terminate()
        service.wait()
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if any(str(folder) in word for word in process.cmdline()):
                    process.kill()
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for mount in sorted((mount for mount in mounts if mount.startswith(str(folder))), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def test_podman_has_machines(podman: str, tmp_path: Path) -> None:
    async def main() -> None:
        config = ContainersConfig(hosts=(podman,), state=tmp_path, machines=2)
        async with Machines(config, "run") as machines:
            machine = await machines.open(SPEC, "a")
            assert (await machine.run(Command("echo out; exit 3"))).exit_code == 3
            assert (await machine.run(Command("sleep 1000", wall_s=1))).timed_out
            await machine.upload({"a": b"x"}, "/made")
            assert (await machine.download("/made")).files() == {"made/a": b"x"}
            tests = await machines.open(SPEC, "tests of a", beside=machine)
            assert (await tests.run(Command("ls /made"))).exit_code != 0
            copied = await machines.open(SPEC.model_copy(update={"image": await machine.snapshot()}), "copy")
            assert (await copied.run(Command("cat /made/a"))).output == "x"
            other = Machines(config.model_copy(update={"wait_s": 0.1}), "other")
            await other.start()
            with pytest.raises(SandboxFailure, match="no machine is free"):
                await other.open(SPEC, "a")
            await other.close()
            await machines.leave()
        async with Machines(config, "run") as machines:
            again = await machines.open(SPEC, "a")
            assert again.is_adopted
            assert (await again.run(Command("cat /made/a"))).output == "x"
            for key in ("tests of a", "copy"):
                assert (await machines.open(SPEC, key)).is_adopted

    asyncio.run(main())
