"""What of the Docker backend needs no daemon: the stream taken apart, options, whose container it is."""

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from deadlines import run_ready_tasks

from agentrl.config.sandbox import SandboxConfig
from agentrl.sandbox.base import ALL_DEFENCES, Defence
from agentrl.sandbox.cgroup import server_name
from agentrl.sandbox.docker import backend
from agentrl.sandbox.docker.container import ContainerReader, open_stream
from agentrl.sandbox.docker.options import SHARES, container_options

DAEMON = {"DockerRootDir": "/var/lib/docker"}
IMAGE = {"Id": "sha256:1", "Config": {"Env": ["PATH=/opt/bin", "VERSION=3"], "Volumes": {"/data": {}}}}
CONTAINER = "c0ffee" * 10


def piece(kind: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", kind, len(data)) + data


def reader_of(*pieces: bytes) -> ContainerReader:
    stream = asyncio.StreamReader()
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    return ContainerReader(stream)


def test_output_is_put_together_and_error_output_kept_apart() -> None:
    async def run() -> None:
        reader = reader_of(piece(1, b"ab"), piece(2, b"wo"), piece(1, b""), piece(1, b"cdef"), piece(2, b"rds"))
        assert await reader.readexactly(3) == b"abc"
        assert await reader.readexactly(0) == b""
        assert await reader.readexactly(3) == b"def"
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(1)
        assert reader.stderr == b"words"

    asyncio.run(run())


def test_only_the_end_of_error_output_is_kept() -> None:
    async def run() -> None:
        reader = reader_of(*[piece(2, b"x" * 1000)] * 5, piece(2, b"end"), piece(1, b"a"))
        await reader.readexactly(1)
        assert len(reader.stderr) == 2048
        assert reader.stderr.endswith(b"xend")

    asyncio.run(run())


def test_a_stream_of_another_form_is_an_error() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="no kind 7"):
            await reader_of(piece(7, b"x")).readexactly(1)

    asyncio.run(run())


def test_a_send_that_nobody_reads_ends_with_the_containers_output() -> None:
    """The daemon stops reading input for a container that has ended; only the other direction shows it."""

    async def run() -> None:
        ours, daemons = socket.socketpair()
        ours.setblocking(False)
        reader, writer = await open_stream(ours)
        writer.write(bytes(2**24))
        sending = asyncio.create_task(writer.drain())
        await run_ready_tasks()
        assert not sending.done()
        daemons.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(asyncio.gather(sending, return_exceptions=True), 5)
        with pytest.raises(asyncio.IncompleteReadError):
            await reader.readexactly(1)
        daemons.close()

    asyncio.run(run())


def options(config: SandboxConfig, without: frozenset[Defence] = frozenset()) -> dict[str, Any]:
    return container_options(config, ALL_DEFENCES - without, DAEMON, IMAGE, "outer/group")


def test_options_with_all_defences() -> None:
    made = options(SandboxConfig.model_validate({"limits": {"memory_mb": 100, "processes": 10, "cpus": 64}}))
    assert made["image"] == "sha256:1"
    assert made["user"] == "65534:65534"
    assert made["entrypoint"] == ["python3"]
    assert made["environment"] == {
        "PATH": "/opt/bin",
        "VERSION": None,
        "HOME": "/work",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
    }
    host = made["host_config"]
    assert host["Memory"] == host["MemorySwap"] == 100 * 2**20
    assert host["PidsLimit"] == 11
    assert (host["CpuPeriod"], host["CpuQuota"]) == (100_000, 6_400_000)
    assert (host["NetworkMode"], host["ReadonlyRootfs"], host["CapDrop"]) == ("none", True, ["ALL"])
    assert host["CgroupParent"] == "/outer/group"
    assert "PidMode" not in host
    assert [option.partition("=")[0] for option in host["SecurityOpt"]] == ["no-new-privileges", "seccomp"]
    assert host["Tmpfs"]["/data"] == "ro,size=4k,nr_inodes=2"


def test_shares_of_disk_and_inodes_make_the_limit() -> None:
    config = SandboxConfig.model_validate({"limits": {"disk_mb": 64, "inodes": 1600}})
    assert sum(sixteenths for sixteenths, _ in SHARES.values()) == 16
    folders = options(config)["host_config"]["Tmpfs"]
    values = {
        folder: dict(word.partition("=")[::2] for word in folders[folder].split(",") if "=" in word)
        for folder in SHARES
    }
    assert sum(int(value["size"].removesuffix("k")) for value in values.values()) == 64 * 1024
    assert sum(int(value["nr_inodes"]) for value in values.values()) == 1600
    assert {value["uid"] for value in values.values()} == {"65534"}


@pytest.mark.parametrize(
    ("defence", "key", "value"),
    [
        (Defence.MEMORY, "Memory", None),
        (Defence.PROCESSES, "PidsLimit", None),
        (Defence.CPU, "CpuQuota", None),
        (Defence.NETWORK, "NetworkMode", "host"),
        (Defence.PROCESS_NAMESPACE, "PidMode", "host"),
        (Defence.KERNEL, "Runtime", None),
        (Defence.FILES, "ReadonlyRootfs", False),
        (Defence.PRIVILEGES, "CapDrop", None),
        (Defence.SECCOMP, "SecurityOpt", ["no-new-privileges", "seccomp=unconfined"]),
    ],
)
def test_a_defence_that_is_away_is_away_alone(defence: Defence, key: str, value: object) -> None:
    config = SandboxConfig(runtime="runsc")
    full_options, less = options(config)["host_config"], options(config, frozenset({defence}))["host_config"]
    assert less.get(key) == value != full_options.get(key)


def test_which_container_is_left_behind() -> None:
    ours = {
        backend.HOST_LABEL: socket.gethostname(),
        backend.BOOT_LABEL: Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        backend.SERVER_LABEL: server_name(),
    }
    number, _, name_end = server_name().partition("-")
    started, _, namespace = name_end.partition("-")
    earlier = f"{number}-{int(started) - 1}-{namespace}"
    assert not backend.is_left_behind(ours)
    assert backend.is_left_behind({**ours, backend.SERVER_LABEL: earlier})
    assert backend.is_left_behind({**ours, backend.BOOT_LABEL: "an earlier one"})
    assert not backend.is_left_behind({**ours, backend.HOST_LABEL: "another", backend.BOOT_LABEL: "another"})
    assert not backend.is_left_behind({**ours, backend.SERVER_LABEL: f"{number}-{int(started) - 1}-1"})


def test_the_machines_files_are_all_shown_but_dockers_own(tmp_path: Path) -> None:
    for name in ("next", "docker/data", "docker/other"):
        (tmp_path / name).mkdir(parents=True)
    daemon, without = {"DockerRootDir": str(tmp_path / "docker/data")}, ALL_DEFENCES - {Defence.FILES}
    mounts = container_options(SandboxConfig(), without, daemon, IMAGE, None)["host_config"]["Mounts"]
    shown = {Path(mount["Source"]) for mount in mounts}
    assert {tmp_path / "next", tmp_path / "docker/other"} <= shown
    assert not any((tmp_path / "docker/data").is_relative_to(path) for path in shown)
    assert Path("/etc") in shown
