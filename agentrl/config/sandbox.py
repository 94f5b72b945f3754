"""The ``sandbox`` section: backend and resource limits of the policy's code."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from agentrl.config.base import Seconds, Section


class SandboxLimits(Section):
    """Resource limits of one sandbox. Memory, processes, disk and inodes are counted over all its processes."""

    wall_s: Seconds = 10.0
    """Wall time of a call, seconds."""
    cpu_s: PositiveInt = 10
    """CPU time of a process in a call, seconds."""
    cpus: PositiveFloat = 1.0
    """Cores that all processes together may keep busy."""
    memory_mb: PositiveInt = 256
    """Memory of all processes together, files in the sandbox included, MiB."""
    processes: int = Field(default=64, ge=4)
    """Processes and threads at the same time."""
    open_files: int = Field(default=256, ge=32)
    """Open files a process."""
    file_mb: PositiveInt = 32
    """Size of one file, MiB."""
    disk_mb: PositiveInt = 64
    """Size of all files, MiB. They are in memory and count there too."""
    inodes: int = Field(default=8192, ge=64)
    """Files and folders."""
    output_kb: PositiveInt = 1024
    """Output of a call, KiB; more ends it."""


class SandboxConfig(Section):
    """The sandbox that tools run code in."""

    backend: str = "bubblewrap"
    """Registered name (entry points ``agentrl.sandboxes``), ``file.py:Class`` or ``module:Class``. ``bubblewrap`` needs no
    daemon, ``docker`` a running one; ``unsafe_subprocess`` is no sandbox at all: the policy's code has this user's rights."""
    limits: SandboxLimits = Field(default_factory=SandboxLimits)
    """Resource limits of one sandbox."""
    hosts: tuple[str, ...] = ()
    """Hosts that code may reach through a proxy, as ``name:port``; none by default: by HTTPS at the ports 443 and 8443, by plain
    HTTP at others."""
    python: str = "python3"
    """The interpreter in the sandbox, by name or by path."""
    readonly: tuple[Path, ...] = ()
    """Folders of this machine that code may read, such as a virtual environment made for it; they have the same path inside.
    Folders with tasks, environments, rewards, tools, or the run's own Python environment are refused: code could read hidden
    tests."""
    image: str = "python:3.12-slim"
    """The image of ``docker``; it must be there already and have Python 3.9 or newer."""
    images: tuple[str, ...] = ()
    """Further images of ``docker``, which tasks may name as ``sandbox_image`` in their metadata; none by default. In a pattern
    such as ``team/*``, ``*`` is any text."""
    runtime: str | None = None
    """The runtime of ``docker`` that has its own kernel, by its name at the daemon: ``runsc`` (gVisor), or Kata's. Without one,
    code runs on the machine's kernel. A runtime on the machine's kernel is refused."""
    docker_url: str | None = None
    """The daemon's address; without one ``DOCKER_HOST`` or the usual socket."""
    accept_no_memory_limit: bool = False
    """Run without cgroups: each process has its limits, but many small ones together may use all memory."""

    @field_validator("hosts")
    @classmethod
    def _host_and_port(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            name, _, port = host.rpartition(":")
            if not name or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{host!r} is no name:port, such as pypi.org:443")
        return hosts

    @field_validator("readonly")
    @classmethod
    def _absolute(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        for path in paths:
            if not path.is_absolute() or path == Path("/"):
                raise ValueError(f"{path} is no absolute path of a folder")
        return paths
