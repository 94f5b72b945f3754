"""The ``containers`` section: daemons, bounds and leases of task containers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from agentrl.config.base import Seconds, Section
from agentrl.core.user_code import MAX_SECONDS


class ContainersConfig(Section):
    """Machines in which tasks of containers are played and graded."""

    hosts: tuple[str, ...] = ()
    """Addresses of the Docker daemons, ``unix:///…`` or ``tcp://HOST:PORT``; none: ``DOCKER_HOST`` or the usual socket. A new
    machine goes to the daemon with the fewest; a daemon that is lost is named and avoided."""
    machines: PositiveInt = 16
    """Machines that a daemon holds at a time, over all processes and runs that use it; further ones wait."""
    warm: NonNegativeInt = 0
    """Machines kept started in addition to those in use, for the specs opened last; they count as machines."""
    lease_s: float = Field(default=600.0, ge=2, le=MAX_SECONDS)
    """Time to live of a machine after the last sign of life of its run, seconds; then it is removed."""
    wait_s: Seconds = 3600.0
    """Time for which opening a machine waits while all daemons are full."""
    start_s: Seconds = 120.0
    """Limit of a machine's start, without pull and build and without health checks."""
    pull_s: Seconds = 1800.0
    """Limit of one image's pull."""
    build_s: Seconds = 1800.0
    """Limit of one image's build, unless its task has another one."""
    build_memory_mb: PositiveInt = 8192
    """Memory of one step of a build, MiB."""
    builds: PositiveInt = 2
    """Images built or pulled at the same time by a process."""
    runtime: str | None = None
    """The runtime with its own kernel, by its name at the daemon: ``runsc`` (gVisor), or Kata's. Without one, machines run on the
    daemon's kernel. A runtime on the daemon's kernel is refused."""
    state: Path | None = None
    """Folder for results of commands; None: ``agentrl/containers`` in ``XDG_STATE_HOME`` or ``~/.local/state``."""

    @field_validator("hosts")
    @classmethod
    def _addresses(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host.startswith(("unix://", "tcp://")):
                raise ValueError(
                    f"{host!r} is no unix:///PATH or tcp://HOST:PORT; forward the socket of another machine by "
                    "`ssh -L /tmp/docker.sock:/var/run/docker.sock HOST`"
                )
        if len(set(hosts)) < len(hosts):
            raise ValueError("a daemon is listed twice")
        return hosts
