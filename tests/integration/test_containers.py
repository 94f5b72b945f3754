"""Machines on a real Docker daemon."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import psutil
import pytest
from command_words import command_words
from deadlines import until
from dockerd import DockerHost
from killed_containers import kill_run

from agentrl.cli.main import main as command_line
from agentrl.config.containers import ContainersConfig
from agentrl.containers.images import Images
from agentrl.containers.leases import MACHINE_LABEL
from agentrl.containers.machine import Command, Machine, MachineEndedError
from agentrl.containers.machines import Machines, state_folder
from agentrl.containers.spec import BuildSpec, Healthcheck, MachineSpec, ServiceSpec, VolumeMount
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure

pytestmark = pytest.mark.slow

SCRIPT = "exec_process.py"


@pytest.fixture(scope="module")
def config(dockerd: DockerHost, tmp_path_factory: pytest.TempPathFactory) -> ContainersConfig:
    return ContainersConfig(hosts=(dockerd.url,), state=tmp_path_factory.mktemp("state"), lease_s=60, machines=8)


@pytest.fixture(scope="module")
def spec(dockerd: DockerHost) -> MachineSpec:
    return MachineSpec(image=dockerd.image, network="no-network", processes=64, memory_mb=128)


def test_commands_and_files(config: ContainersConfig, spec: MachineSpec) -> None:
    async def main() -> None:
        async with Machines(config, "test") as machines, await machines.open(spec, "key") as machine:
            await check_commands(machine)
            await check_files(machine)
            await check_limits(machine)
            await check_that_calls_run_once(machine, state_folder(config))

    asyncio.run(main())


async def check_commands(machine: Machine) -> None:
    both = "i=0; while [ $i -lt 200 ]; do echo out $i; echo err $i >&2; i=$((i + 1)); done; exit 3"
    result = await machine.run(Command(both))
    assert result.exit_code == 3
    assert result.output.splitlines() == [f"{stream} {number}" for number in range(200) for stream in ("out", "err")]
    assert (await machine.run(Command(("no-such-program",)))).exit_code == 126
    assert (await machine.run(Command("true", cwd="/no/such/folder"))).exit_code == 126
    facts = await machine.run(Command("id -un; echo $A", user="nobody", env={"A": "b"}))
    assert facts.output == "nobody\nb\n"
    vsock = "import socket\nfor family in (socket.AF_NETLINK, 40):\n try: print(socket.socket(family, socket.SOCK_RAW).family)\n"
    refused = await machine.run(Command(("python3", "-c", vsock + " except OSError as error: print(error)")))
    assert refused.output == "16\n[Errno 97] Address family not supported by protocol\n"


async def check_files(machine: Machine) -> None:
    await machine.upload({"a/b.txt": b"hello"}, "/made/folder", owner="nobody")
    listed = await machine.run(Command("stat -c %U /made/folder/a/b.txt; cat b.txt", cwd="/made/folder/a"))
    assert listed.output == "nobody\nhello"
    await machine.run(Command("ln -s /etc/passwd leak; ln -s b.txt inner; mkfifo pipe", cwd="/made/folder/a"))
    download = await machine.download("/made/folder")
    assert download.files() == {"folder/a/b.txt": b"hello"}
    assert set(download.left_out) == {"folder/a/leak", "folder/a/pipe"}
    # A link that the agent planted where something is written is replaced, and not followed.
    await machine.run(Command("mkdir /elsewhere; ln -s /elsewhere /tests"))
    await machine.upload({"test.sh": b"true"}, "/tests")
    assert (await machine.run(Command("ls /elsewhere; ls /tests"))).output == "test.sh\n"


async def check_limits(machine: Machine) -> None:
    await machine.run(Command("sleep 1001 &"))
    late = await machine.run(Command("setsid sleep 1002 & (env -i setsid sleep 1003 &) ; sleep 1004", wall_s=0.5))
    assert late.timed_out
    assert late.exit_code is None
    processes = (await machine.run(Command("ps ax"))).output
    assert [number for number in range(1001, 1005) if f"sleep {number}" in processes] == [1001]
    flood = await machine.run(Command("yes", output_bytes=1000))
    assert flood.flooded
    assert len(flood.output) < 1100
    await machine.run(Command("f() { f | f & }; f; sleep 1005", wall_s=0.5))
    await machine.kill_all()
    assert "sleep" not in (await machine.run(Command("ps ax"))).output


async def check_that_calls_run_once(machine: Machine, state: Path) -> None:
    command = Command("echo x >> /calls; cat /calls", call_id="7")
    results = await asyncio.gather(machine.run(command), machine.run(command))
    assert results[0] == results[1] == await machine.run(command)
    assert results[0].output == "x\n"
    # The process of a command is killed: the next one takes up the command, which the daemon still runs.
    await machine.run(Command("mkfifo /gate"))
    waiting = Command("echo y >> /calls; echo begun; read line < /gate; exit 5", call_id="8")
    first = asyncio.create_task(machine.run(waiting))
    await until(lambda: any("begun" in file.read_text() for file in state.glob("*/*/head")))
    for process in psutil.Process().children(recursive=True):
        if any(word.endswith(SCRIPT) for word in command_words(process)):
            process.kill()
    with pytest.raises(SandboxFailure, match="ended with -9"):
        await first
    second = asyncio.create_task(machine.run(waiting))
    await machine.run(Command("echo go > /gate"))
    result = await second
    assert (result.exit_code, result.output, result.is_cut) == (5, "begun\n", True)
    assert (await machine.run(Command("cat /calls"))).output == "x\ny\n"


def test_machines_are_taken_up_copied_and_kept_warm(
    config: ContainersConfig, spec: MachineSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with Machines(config, "run") as machines:
            machine = await machines.open(spec, "episode")
            await machine.run(Command("echo state > /file"))
            await machines.leave()
        await asyncio.to_thread(command_line, ["containers", "ls", "--host", config.hosts[0]])
        async with Machines(config.model_copy(update={"warm": 1}), "run") as machines:
            again = await machines.open(spec, "episode")
            assert again.is_adopted
            assert again.id == machine.id
            await machines.warm_pool.wait_full()
            scan = await machines.hosts[0].scan()
            other = await machines.open(spec, "other")
            assert not other.is_adopted
            assert other.id in {container["Labels"][MACHINE_LABEL] for container in scan.machines}
            assert (await other.run(Command("cat /file"))).exit_code == 1
            copied = await machines.open(spec.model_copy(update={"image": await again.snapshot()}), "copy")
            assert (await copied.run(Command("cat /file"))).output == "state\n"

    asyncio.run(main())
    printed = capsys.readouterr().out
    assert "episode" in printed
    assert "running" in printed


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.2", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def fetch(url: str) -> Command:
    code = (
        f"import urllib.request as u\ntry: print(u.urlopen({url!r}, timeout=20).read())\nexcept OSError as e: print(e)"
    )
    return Command(("python3", "-c", code))


def test_allowed_hosts_alone_are_reached(config: ContainersConfig, spec: MachineSpec, port: int) -> None:
    async def main() -> None:
        async with Machines(config, "test") as machines:
            allowed = spec.model_copy(
                update={"network": "allowlist", "allowed_hosts": ("127.0.0.2/32", "*.example.org")}
            )
            machine = await machines.open(allowed, "allowed")
            assert (await machine.run(fetch(f"http://127.0.0.2:{port}/"))).output == "b'hello'\n"
            assert "403" in (await machine.run(fetch(f"http://127.0.0.3:{port}/"))).output
            await machine.kill_all()  # with its network namespace
            assert (await machine.run(fetch(f"http://127.0.0.2:{port}/"))).output == "b'hello'\n"
            closed = await machines.open(spec, "closed")
            assert "hello" not in (await closed.run(fetch(f"http://127.0.0.2:{port}/"))).output

    asyncio.run(main())


def test_a_machine_ends_that_writes_more_than_its_disk(config: ContainersConfig, spec: MachineSpec) -> None:
    async def main() -> None:
        async with Machines(config, "test") as machines:
            small = spec.model_copy(update={"disk_mb": 8})
            machine = await machines.open(small, "disk")
            big = await machine.run(Command("head -c 9000000 /dev/zero > /big; stat -c %s /big"))
            assert big.output.splitlines()[-1] == str(8 * 2**20)
            with suppress(MachineEndedError):  # the watch may look before the command ends
                await machine.run(Command("head -c 9000000 /dev/zero > /more"))
            await machines.disk_watch.look(machine.client)
            with pytest.raises(MachineEndedError, match="wrote more than 8 MiB") as ended:
                await machine.run(Command("true"))
            assert ended.value.is_by_policy
            assert not (await machines.open(small, "disk")).is_adopted

    asyncio.run(main())


def test_services_are_reached_by_name(config: ContainersConfig, spec: MachineSpec, dockerd: DockerHost) -> None:
    serve = ServiceSpec(
        name="web",
        image=dockerd.image,
        command=("sh", "-c", "echo shared > /data/a; exec python3 -m http.server 80"),
        healthcheck=Healthcheck(
            command="python3 -c 'import socket; socket.create_connection((\"web\", 80))'", interval_s=0.2, retries=100
        ),
        volumes=(VolumeMount(name="data", path="/data"),),
    )
    with_service = spec.model_copy(
        update={"services": (serve,), "volumes": (VolumeMount(name="data", path="/app/data", read_only=True),)}
    )

    async def main(key: str) -> None:
        async with Machines(config, "test") as machines:
            machine = await machines.open(with_service, key)
            assert "Directory listing" in (await machine.run(fetch("http://web/"))).output
            assert (await machine.run(Command("cat /app/data/a"))).output == "shared\n"
            written = await machine.run(Command("echo 2 > /app/data/a"))
            assert written.output == "/bin/sh: 1: cannot create /app/data/a: Read-only file system\n"
            service = await machine.service("web")
            assert (await service.download("/data/a")).files() == {"a": b"shared\n"}
            assert (await service.run(Command("echo > /data/b; ls /data"))).output == "a\nb\n"
            await machine.close()
            assert not (await machines.hosts[0].scan()).machines
            label = {"label": MACHINE_LABEL}
            assert not (await machine.client.call(lambda api: api.volumes(filters=label)))["Volumes"]

    asyncio.run(main("with a network"))


async def check_new_base(images: Images, dockerd: DockerHost, folder: Path) -> None:
    """An image is built again after its base image was rebuilt."""
    folder.mkdir()
    (folder / "Dockerfile").write_text(f"FROM agentrl-base:test\nLABEL test={folder}\nRUN cat /built > /read\n")
    client = docker.APIClient(base_url=dockerd.url)
    ids = []
    for text in ("one", "two"):
        new_base = folder.with_name(f"base-{text}")
        new_base.mkdir()
        (new_base / "Dockerfile").write_text(f"FROM {dockerd.image}\nLABEL test={folder}\nRUN echo {text} > /built\n")
        client.tag(await images.ensure(None, BuildSpec(context=new_base)), "agentrl-base", "test", force=True)
        ids += [await images.ensure(None, BuildSpec(context=folder)) for _ in range(2)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    client.remove_image("agentrl-base:test")
    assert await images.ensure(None, BuildSpec(context=folder)) == ids[3]  # nothing to compare
    client.close()


def test_images_are_built_once(config: ContainersConfig, dockerd: DockerHost, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM {dockerd.image}\nLABEL test={tmp_path}\nRUN echo built > /built\nCOPY . /context\n"
    )
    (tmp_path / ".dockerignore").write_text("secret\n")
    (tmp_path / "secret").write_text("1")
    lines: list[str] = []

    async def main() -> None:
        async with Machines(config, "test") as machines:
            images: Images = machines.hosts[0].images
            build = BuildSpec(context=tmp_path)
            ids = await asyncio.gather(*(images.ensure(None, build, lines.append) for _ in range(2)))
            assert ids[0] == ids[1] == await images.ensure(None, build)
            machine = await machines.open(MachineSpec(build=build, network="no-network"), "built")
            assert (await machine.run(Command("cat /built; ls /context"))).output == "built\nDockerfile\n"
            await check_new_base(images, dockerd, tmp_path / "derived")
            (tmp_path / "Dockerfile").write_text(f"FROM {dockerd.image}\nRUN exit 9\n")
            with pytest.raises(SandboxFailure, match="non-zero code: 9"):
                await images.ensure(None, build)
            with pytest.raises(ConfigError, match="there is no such file"):
                await images.ensure(None, BuildSpec(context=tmp_path, dockerfile="Other"))

    asyncio.run(main())
    assert sum("Successfully tagged" in line for line in lines) == 1


def test_instructions_of_buildkit(config: ContainersConfig, dockerd: DockerHost, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"# syntax=docker/dockerfile:1\nARG BASE\nFROM $BASE\nLABEL test={tmp_path}\n"
        "RUN --mount=type=cache,target=/cache echo printed && echo cached > /cache/a && cp /cache/a /built\n"
        "COPY --chmod=600 file /copied\n"
    )
    (tmp_path / "file").write_text("content\n")
    lines: list[str] = []

    async def main() -> None:
        async with Machines(config, "test") as machines:
            images: Images = machines.hosts[0].images
            build = BuildSpec(context=tmp_path, args={"BASE": dockerd.image})
            await images.ensure(None, build, lines.append)
            machine = await machines.open(MachineSpec(build=build, network="no-network"), "built")
            assert (
                await machine.run(Command("cat /built /copied; stat -c %a /copied"))
            ).output == "cached\ncontent\n600\n"
            for text, fault in {
                "RUN --mount=type=secret,id=a,required=true cat /run/secrets/a": "no secrets, keys or logins of this machine",
                "RUN --mount=type=unknown true": "docker buildx build",
            }.items():
                (tmp_path / "Dockerfile").write_text(f"FROM {dockerd.image}\n{text}\n")
                with pytest.raises(SandboxFailure, match=fault):
                    await images.ensure(None, build)

    asyncio.run(main())
    assert "RUN --mount: built by BuildKit" in lines
    assert "printed" in lines


def test_what_a_daemon_lacks_is_named(config: ContainersConfig, spec: MachineSpec) -> None:
    async def main() -> None:
        async with Machines(config, "test") as machines:
            machines.hosts[0].client.info["IPv4Forwarding"] = False
            with pytest.raises(MissingError, match="network=public"):
                await machines.open(spec.model_copy(update={"network": "public"}), "a")
            with pytest.raises(MissingError, match="no image agentrl-task:none"):
                await machines.open(spec.model_copy(update={"image": "agentrl-task:none"}), "a")
            with pytest.raises(ConfigError, match="runs machines on the kernel of the daemon"):
                await machines.open(spec.model_copy(update={"runtime": "io.containerd.runc.v2"}), "a")
        with pytest.raises(MissingError, match=r"containers\.runtime=runsc"):
            await Machines(config.model_copy(update={"runtime": "runsc"}), "test").start()

    asyncio.run(main())


def test_nothing_is_left_of_a_killed_run(dockerd: DockerHost, tmp_path: Path) -> None:
    killed = kill_run(dockerd.url, dockerd.image, tmp_path, machines=8, bound=3, played=4, lease_s=2)
    assert killed.at_the_kill
    assert killed.most_machines <= 3
    assert killed.remains == []
