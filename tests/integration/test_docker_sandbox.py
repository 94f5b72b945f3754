"""Sandboxes by Docker, with a real daemon."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import docker
import pytest
from dockerd import IMAGE, DockerHost, NoDocker, OwnDaemon, import_image, own_daemon

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Job, Outcome, Sandbox, SandboxBackend
from agentrl.sandbox.canary.check import check_backend
from agentrl.sandbox.docker.backend import DockerBackend
from agentrl.toolserver.server.task_images import TaskImages

pytestmark = pytest.mark.slow

Play = Callable[[DockerBackend], Awaitable[None]]


def config(host: DockerHost, **values: object) -> SandboxConfig:
    return SandboxConfig(backend="docker", docker_url=host.url, image=host.image, **values)  # type: ignore[arg-type]


def play(host: DockerHost, coroutine: Play, **values: object) -> None:
    """Run a coroutine with a started backend; nothing of it may be left afterwards."""

    async def run() -> None:
        async with DockerBackend(config(host, **values)) as backend:
            await coroutine(backend)

    asyncio.run(run())
    assert containers(host.url) == []


def containers(url: str) -> list[str]:
    client = docker.APIClient(base_url=url)
    try:
        found_containers = client.containers(all=True, filters={"label": "agentrl.sandbox"})
        return sorted(container["Labels"]["agentrl.sandbox"] for container in found_containers)
    finally:
        client.close()


@contextlib.asynccontextmanager
async def opened(backend: DockerBackend) -> AsyncIterator[Sandbox]:
    sandbox = await backend.open("session")
    async with sandbox:
        yield sandbox


async def python(sandbox: Sandbox, code: str, **options: object) -> Outcome:
    return await sandbox.run(Job("call", code=textwrap.dedent(code), **options))  # type: ignore[arg-type]


def test_every_status_but_memory(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            ok = await python(sandbox, "print(input())", stdin=b"said")
            assert (ok.status, ok.stdout, ok.exit_code) == (ToolStatus.OK, "said\n", 0)
            error = await python(sandbox, "1 / 0")
            assert error.status is ToolStatus.ERROR
            assert error.stderr.endswith("ZeroDivisionError: division by zero\n")
            slow = await python(sandbox, "while True: pass", wall_s=0.2)
            assert (slow.status, slow.detail) == (ToolStatus.TIMEOUT, "timed out after 0.2 s")
            loud = await python(sandbox, "while True: print('x' * 1000)", output_bytes=5000)
            assert (loud.status, len(loud.stdout)) == (ToolStatus.OUTPUT_CUT, 5000)
            killed = await python(sandbox, "import os; os.kill(os.getpid(), 9)")
            assert (killed.status, killed.exit_code) == (ToolStatus.KILLED, -9)
            program = await sandbox.run(Job("call", argv=("sh", "-c", "echo $ONE; exit 3"), env={"ONE": "1"}))
            assert (program.status, program.stdout, program.exit_code) == (ToolStatus.ERROR, "1\n", 3)

    play(dockerd, calls)


def test_files_and_variables_stay_and_children_do_not(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            await sandbox.write_file("folder/file", bytes(range(256)) * 4096)
            read = await python(sandbox, "data = open('folder/file', 'rb').read(); print(len(data))", stateful=True)
            assert read.stdout == "1048576\n"
            write = await python(sandbox, "open('/tmp/out', 'wb').write(data[:3])", stateful=True)
            assert write.status is ToolStatus.OK
            assert await sandbox.read_file("/tmp/out") == b"\0\1\2"
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file("missing")
            await python(sandbox, "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
            listing = await sandbox.run(Job("call", argv=("ps", "-e", "-o", "comm=")))
            assert "sleep" not in listing.stdout

    play(dockerd, calls)


def test_environment_is_neither_the_servers_nor_the_images(
    dockerd: DockerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the server")

    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            outcome = await sandbox.run(Job("call", argv=("env",)))
            names = {line.partition("=")[0] for line in outcome.stdout.splitlines()}
            assert names == {"PATH", "HOME", "LANG", "TMPDIR", "HOSTNAME"}

    client = docker.APIClient(base_url=dockerd.url)
    made = client.create_container(dockerd.image, ["true"])
    try:
        client.commit(made, "agentrl-sandbox", "variables", changes=["ENV OF_THE_IMAGE=1", "VOLUME /kept"])
        play(DockerHost(dockerd.url, "agentrl-sandbox:variables"), calls)
    finally:
        client.remove_container(made)
        client.remove_image("agentrl-sandbox:variables")
        client.close()


def test_children_share_one_limit_of_memory(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            outcome = await python(
                sandbox,
                """
                import os, time
                for _ in range(8):
                    if os.fork() == 0:
                        hold = b'x' * (40 << 20)
                        time.sleep(1)
                        os._exit(0)
                for _ in range(8):
                    os.wait()
                """,
            )
            assert (outcome.status, outcome.detail) == (ToolStatus.OUT_OF_MEMORY, "out of memory")
            state_after = await python(sandbox, "print('alive')")
            assert (state_after.status, state_after.stdout) == (ToolStatus.OK, "alive\n")

    play(dockerd, calls, limits={"memory_mb": 128})


FILL = """
with open('fill', 'wb') as file:
    for _ in range(50 * 16):
        file.write(bytes(65536))
"""
HOLD = "hold = b'x' * (200 << 20)"


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "after another kill"])
def test_end_of_the_runner_for_memory_is_the_calls_doing(dockerd: DockerHost, earlier: bool) -> None:
    """Files fill the memory, so that the kernel has nobody to kill but the runner."""

    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            if earlier:
                assert (await python(sandbox, HOLD)).status is ToolStatus.OUT_OF_MEMORY
            assert (await python(sandbox, FILL)).status is ToolStatus.OK
            outcome = await python(sandbox, "pass", stdin=bytes(20 << 20))
            assert outcome.status is ToolStatus.OUT_OF_MEMORY
            assert not sandbox.alive

    play(dockerd, calls, limits={"memory_mb": 64, "disk_mb": 128, "file_mb": 128})


@pytest.mark.parametrize("earlier", [False, True], ids=["first", "after a kill for memory"])
def test_kill_of_the_runner_from_outside_is_a_failure(dockerd: DockerHost, earlier: bool) -> None:
    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            if earlier:
                assert (await python(sandbox, HOLD)).status is ToolStatus.OUT_OF_MEMORY
            call = asyncio.create_task(python(sandbox, "import time; time.sleep(60)"))
            await asyncio.sleep(0.3)
            os.kill(int(pid_of(dockerd, sandbox.id)), signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(SandboxFailure, match="exit status 137"):
                await call
            assert time.monotonic() - began < 8  # the call's own limit is ten seconds
            assert not sandbox.alive

    play(dockerd, calls, limits={"memory_mb": 64})


def pid_of(host: DockerHost, name: str) -> int:
    client = docker.APIClient(base_url=host.url)
    try:
        return int(client.inspect_container(name)["State"]["Pid"])
    finally:
        client.close()


def test_disk_and_inodes_are_bounded_together(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            written = await python(
                sandbox,
                """
                import os
                total = 0
                for folder in ('/work', '/tmp', '/dev/shm'):
                    try:
                        with open(folder + '/fill', 'wb', buffering=0) as file:
                            while True:
                                total += file.write(bytes(65536))
                    except OSError as error:
                        assert error.errno == 28, error
                    os.unlink(folder + '/fill')
                print(total / 2**20)
                """,
            )
            assert 15 <= float(written.stdout) <= 16
            made = await python(
                sandbox,
                """
                total = 0
                for folder in ('/work', '/tmp', '/dev/shm'):
                    try:
                        while True:
                            open('%s/%d' % (folder, total), 'wb').close()
                            total += 1
                    except OSError as error:
                        assert error.errno == 28, error
                print(total)
                """,
            )
            assert 150 < int(made.stdout) <= 160
            elsewhere = await sandbox.run(Job("call", argv=("sh", "-c", "echo > /var/tmp/file")))
            assert "Read-only file system" in elsewhere.stderr

    play(dockerd, calls, limits={"disk_mb": 16, "inodes": 160})


def test_shared_memory_goes_with_its_processes(dockerd: DockerHost) -> None:
    """A System V segment would outlive its call, and the next call would pay for it."""

    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            outcome = await python(
                sandbox,
                """
                import ctypes
                libc = ctypes.CDLL(None, use_errno=True)
                libc.shmat.restype = ctypes.c_void_p
                segment = libc.shmget(0, 16 << 20, 0o1600)
                assert segment >= 0 and libc.shmat(segment, None, 0) != ctypes.c_void_p(-1).value
                print(len(open('/proc/sysvipc/shm').readlines()))
                """,
            )
            assert outcome.stdout == "2\n"
            state_after = await python(sandbox, "print(len(open('/proc/sysvipc/shm').readlines()))")
            assert state_after.stdout == "1\n"

    play(dockerd, calls)


def test_readonly_folders_are_there_and_stay_as_they_are(dockerd: DockerHost, tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    (folder / "file").write_text("content")

    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            assert await sandbox.read_file(str(folder / "file")) == b"content"
            with pytest.raises(OSError, match="Read-only") as refused:
                await sandbox.write_file(str(folder / "file"), b"other")
            assert refused.value.errno == errno.EROFS

    play(dockerd, calls, readonly=(folder,))
    assert (folder / "file").read_text() == "content"


def test_a_runtime_on_the_machines_own_kernel_is_refused_by_the_canary(dockerd: DockerHost) -> None:
    """The daemon's usual runtime stands for one that is registered under a name of its own and isolates no better."""

    async def calls(backend: DockerBackend) -> None:
        async with opened(backend) as sandbox:
            client = docker.APIClient(base_url=dockerd.url)
            assert client.inspect_container(sandbox.id)["HostConfig"]["Runtime"] == "io.containerd.runc.v2"
            client.close()
        with pytest.raises(MissingError, match=r"Possible in it: run on the machine's kernel \(kernel\): kernel "):
            await check_backend(backend)

    play(
        dockerd,
        calls,
        runtime="io.containerd.runc.v2",
        limits=SandboxLimits(memory_mb=64, disk_mb=8, file_mb=4, inodes=256),
    )


def test_canary_finds_nothing(dockerd: DockerHost) -> None:
    play(dockerd, check_backend)


def test_the_image_that_a_task_names_is_allowed_checked_and_used(dockerd: DockerHost) -> None:
    other_image, missing_image = "agentrl-sandbox:marked", "agentrl-sandbox:missing"

    async def marker(backend: SandboxBackend) -> str:
        async with await backend.open("session") as sandbox:
            return (await sandbox.run(Job("call", argv=("sh", "-c", "echo $(cat /marker 2>&1)")))).stdout

    async def calls(backend: DockerBackend) -> None:
        images = TaskImages(backend)
        try:
            images.check_allowed(other_image)
            assert await marker(await images.backend(other_image)) == "of the task\n"
            assert "No such file" in await marker(await images.backend(None))
            with pytest.raises(SandboxFailure, match=f"image {missing_image} .*docker pull {missing_image}"):
                await images.backend(missing_image)
        finally:
            await images.close()

    client = docker.APIClient(base_url=dockerd.url)
    made = client.create_container(dockerd.image, ["sh", "-c", "echo of the task > /marker"])
    try:
        client.start(made)
        client.wait(made)
        client.commit(made, *other_image.split(":"))
        play(dockerd, calls, images=("agentrl-sandbox:m*",))
    finally:
        client.remove_container(made)
        client.remove_image(other_image)
        client.close()


def test_close_is_quick_and_a_call_under_way_fails(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        sandbox = await backend.open("session")
        call = asyncio.create_task(python(sandbox, "import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await asyncio.gather(sandbox.close(), sandbox.close())
        assert time.monotonic() - began < 8  # Docker waits ten seconds for an attached stream
        with pytest.raises(SandboxFailure, match="closed"):
            await call
        assert containers(dockerd.url) == []

    play(dockerd, calls)


def test_opening_that_is_given_up_leaves_nothing(dockerd: DockerHost) -> None:
    async def calls(backend: DockerBackend) -> None:
        began = time.monotonic()
        await (await backend.open("session")).close()
        open_s = time.monotonic() - began
        given_up = 0
        for fraction in (0.02, 0.1, 0.2, 0.4, 0.6):
            opening = asyncio.create_task(backend.open("session"))
            await asyncio.wait({opening}, timeout=fraction * open_s)
            if opening.done():  # the machine was quicker than the time before
                await (await opening).close()
                continue
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            given_up += 1
        assert given_up > 0
        assert containers(dockerd.url) == []

    play(dockerd, calls)


def test_six_at_once_get_their_own_replies(dockerd: DockerHost) -> None:
    async def one(backend: DockerBackend, number: int) -> None:
        async with opened(backend) as sandbox:
            for call in range(4):
                outcome = await python(sandbox, f"print({number}, {call})")
                assert outcome.stdout == f"{number} {call}\n"

    async def calls(backend: DockerBackend) -> None:
        await asyncio.gather(*(one(backend, number) for number in range(6)))

    play(dockerd, calls)


SERVER = """
import asyncio, sys
from agentrl.config.sandbox import SandboxConfig
from agentrl.sandbox.docker.backend import DockerBackend

async def main():
    async with DockerBackend(SandboxConfig(docker_url=sys.argv[1], image=sys.argv[2])) as backend:
        sandboxes = [await backend.open("session") for _ in range(2)]
        print(*(sandbox.id for sandbox in sandboxes), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_start_removes_what_a_killed_server_has_left(dockerd: DockerHost) -> None:
    def server() -> tuple[subprocess.Popen[str], set[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, dockerd.url, dockerd.image], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, set(process.stdout.readline().split())

    killed, of_killed = server()
    living, of_living = server()
    killed.kill()
    killed.communicate()
    try:
        assert set(containers(dockerd.url)) == of_killed | of_living

        async def start() -> None:
            async with DockerBackend(config(dockerd)):
                assert set(containers(dockerd.url)) == of_living

        asyncio.run(start())
    finally:
        living.kill()
        living.communicate()
    play(dockerd, lambda backend: asyncio.sleep(0))


@pytest.fixture
def daemon() -> Iterator[OwnDaemon]:
    """A daemon that a test may kill."""
    with contextlib.ExitStack() as exits:
        try:
            daemon = exits.enter_context(own_daemon())
            import_image(daemon.url)
        except NoDocker as error:
            pytest.skip(f"Docker: {error}")
        yield daemon
        assert daemon.children() != []
    assert daemon.children() == []
    assert daemon.cgroups() == []


def test_kill_of_the_daemon_in_mid_call(daemon: OwnDaemon) -> None:
    host = DockerHost(daemon.url, IMAGE)

    async def calls(backend: DockerBackend) -> None:
        sandboxes = [await backend.open("session") for _ in range(2)]
        running = [asyncio.create_task(python(sandbox, "import time; time.sleep(60)")) for sandbox in sandboxes]
        await asyncio.sleep(0.5)
        daemon.kill()
        began = time.monotonic()
        for call in running:
            with pytest.raises(SandboxFailure, match="no Docker daemon answers"):
                await call
        assert time.monotonic() - began < 8  # the calls' own limit is ten seconds
        with pytest.raises(SandboxFailure, match="no container could be started"):
            await backend.open("session")
        await sandboxes[0].close()
        daemon.start()
        async with opened(backend) as sandbox:
            assert (await python(sandbox, "print('back')")).stdout == "back\n"
            # The first was closed while there was no daemon, the second is still to be.
            assert containers(daemon.url) == sorted([sandbox.id, sandboxes[1].id])

    play(host, calls)


def test_refusals_say_what_to_do(dockerd: DockerHost, tmp_path: Path) -> None:
    def refused(kind: type[Exception], words: str, **values: object) -> None:
        async def start() -> None:
            fields = {"backend": "docker", "docker_url": dockerd.url, "image": dockerd.image, **values}
            with pytest.raises(kind, match=words):
                await DockerBackend(SandboxConfig.model_validate(fields)).start()

        asyncio.run(start())

    refused(MissingError, "start it .* sandbox.docker_url .* sandbox.backend=bubblewrap", docker_url="unix:///nowhere")
    refused(MissingError, "docker pull nobody/has:this", image="nobody/has:this")
    refused(MissingError, r"sandbox\.python=python9 does not work", python="python9")
    refused(MissingError, r"sandbox\.python=/bin/true .*container exited, exit status 0", python="/bin/true")
    refused(MissingError, r"sandbox\.readonly|/not/there", readonly=("/not/there",))
    refused(ConfigError, "ssh -L", docker_url="ssh://somewhere")
    refused(MissingError, r"sandbox\.runtime=runsc.* has only .*runc.*runsc install", runtime="runsc")
    assert containers(dockerd.url) == []


OLD_PYTHON = """#!/bin/sh
exec python3 -c '
import json, struct, sys
while True:
    (length,) = struct.unpack("<I", sys.stdin.buffer.read(4))
    request = json.loads(sys.stdin.buffer.read(length))
    reply = json.dumps({"id": request["id"], "sizes": [], "python": "3.8.19", "pid": 1}).encode()
    sys.stdout.buffer.write(struct.pack("<I", len(reply)) + reply)
    sys.stdout.flush()
'
"""


def test_old_python_is_refused(dockerd: DockerHost, tmp_path: Path) -> None:
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    old = tmp_path / "python3.8"
    old.write_text(OLD_PYTHON)
    old.chmod(0o755)

    async def start() -> None:
        with pytest.raises(MissingError, match=r"has Python 3\.8; 3\.9 or newer"):
            await DockerBackend(config(dockerd, readonly=(tmp_path,), python=str(old))).start()

    asyncio.run(start())
    assert containers(dockerd.url) == []
