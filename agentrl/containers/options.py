"""Options of the containers of machines and services: limits, network, system calls."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import docker

from agentrl.containers.docker_api import Options
from agentrl.containers.leases import MACHINE_LABEL
from agentrl.containers.spec import Healthcheck, MachineSpec, ServiceSpec, VolumeMount
from agentrl.core.atomic_files import write_atomically
from agentrl.sandbox.cgroup import PERIOD_US
from agentrl.sandbox.egress import proxy_environment
from agentrl.sandbox.seccomp import machine_profile

FIRST_PROCESS = "trap : TERM INT; exec 3<&0; while :; do ( read -r _ <&3 ) & wait; done"
"""Shell text of the first process: it waits with the shell's builtins alone, and reaps processes that lost their parent."""
DROPPED_CAPABILITIES = ("MKNOD", "NET_RAW")
"""Capabilities that Docker grants and machines do not get: package managers, compilers, debuggers, web servers and ``su``
work without them."""
PODMAN_PROCESSES = 32768
"""Processes of a user that Podman's service may allow: it lowers its own limit to this."""
API_VERSION = "1.41"
"""API version of the options, which newer daemons take as well."""
_profile = cache(machine_profile)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a daemon takes options that Docker and Podman take in different ways."""

    seccomp: str
    """The profile of system calls: its text for Docker, a file with it for Podman."""
    ulimits: tuple[docker.types.Ulimit, ...] = ()
    """Limits in addition to those of `machine_options`: Podman starts with its own, which may be above those of its user."""

    def options(self, disk_mb: int) -> Options:
        """Return the options, with the size of files that ``disk_mb`` allows."""
        # One file of the whole quota ends at once; many are counted from time to time, without a quota of the storage driver.
        size = docker.types.Ulimit(name="fsize", soft=disk_mb * 2**20, hard=disk_mb * 2**20)
        return {"security_opt": [f"seccomp={self.seccomp}"], "ulimits": [size, *self.ulimits]}


def docker_dialect() -> Dialect:
    """Return how Docker takes options."""
    return Dialect(_profile())


def podman_dialect(folder: Path) -> Dialect:
    """Return how Podman takes options, which must be on this machine: it reads a file in ``folder``."""
    profile = _profile()
    file = folder / f"seccomp-{hashlib.sha256(profile.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(file) as partial:
            partial.write_text(profile)
    files, processes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    limits = {"nofile": files, "nproc": PODMAN_PROCESSES if processes < 0 else min(processes, PODMAN_PROCESSES)}
    return Dialect(
        str(file), tuple(docker.types.Ulimit(name=name, soft=value, hard=value) for name, value in limits.items())
    )


def machine_options(
    spec: MachineSpec, image: str, labels: Mapping[str, str], network: Options, *, dialect: Dialect, has_quota: bool
) -> Options:
    """Return the arguments of `docker.APIClient.create_container` for a machine.

    Args:
        spec: the machine.
        image: the id of its image.
        labels: its labels.
        network: options of its network.
        dialect: of the daemon.
        has_quota: whether the storage driver limits the size of the root.
    """
    host = _limits(spec.memory_mb, spec.cpus, spec.processes) | dialect.options(spec.disk_mb) | network
    host["mounts"] = _mounts(spec.volumes, labels[MACHINE_LABEL])
    if has_quota:
        host["storage_opt"] = {"size": f"{spec.disk_mb}m"}
    if spec.runtime is not None:
        host["runtime"] = spec.runtime
    return {
        "image": image,
        "command": ["/bin/sh", "-c", FIRST_PROCESS],
        "user": spec.user,
        "working_dir": spec.workdir,
        "hostname": None if "container:" in str(network["network_mode"]) else "machine",
        "environment": machine_environment(spec),
        "labels": dict(labels),
        "stdin_open": True,
        "tty": False,
        "stop_signal": "SIGKILL",
        "healthcheck": {"test": ["NONE"]},
        "host_config": docker.types.HostConfig(version=API_VERSION, **host),
    }


def machine_environment(spec: MachineSpec) -> dict[str, str]:
    """Return the environment variables of a machine's commands, in addition to those of its image."""
    return {**(proxy_environment() if spec.network == "allowlist" else {}), **spec.env}


def service_options(
    service: ServiceSpec,
    machine: MachineSpec,
    image: str,
    labels: Mapping[str, str],
    network: Options,
    *,
    dialect: Dialect,
) -> Options:
    """Return the arguments of `docker.APIClient.create_container` for a service of a machine."""
    limits = _limits(service.memory_mb or machine.memory_mb, service.cpus or machine.cpus, machine.processes)
    host = limits | dialect.options(machine.disk_mb) | network
    host["mounts"] = _mounts(service.volumes, labels[MACHINE_LABEL])
    if machine.runtime is not None:
        host["runtime"] = machine.runtime
    return {
        "image": image,
        "command": None if service.command is None else list(service.command),
        "user": service.user,
        "environment": dict(service.env),
        "labels": dict(labels),
        "hostname": None if "container:" in str(network["network_mode"]) else service.name,
        "healthcheck": {"test": ["NONE"]} if service.healthcheck is None else _healthcheck(service.healthcheck),
        "host_config": docker.types.HostConfig(version=API_VERSION, **host),
    }


def _limits(memory_mb: int, cpus: float, processes: int) -> Options:
    return {
        "init": False,
        "log_config": docker.types.LogConfig(type="none"),
        "restart_policy": {"Name": "no"},
        "cap_drop": list(DROPPED_CAPABILITIES),
        "mem_limit": memory_mb * 2**20,
        "memswap_limit": memory_mb * 2**20,
        "pids_limit": processes,
        # Not nano_cpus: Docker refuses more than the machine has.
        "cpu_period": PERIOD_US,
        "cpu_quota": max(1000, round(cpus * PERIOD_US)),
    }


def volume_name(machine_id: str, name: str) -> str:
    """Return what a volume of a machine is called at the daemon."""
    return f"agentrl-{machine_id}-{name}"


def _mounts(volumes: Sequence[VolumeMount], machine_id: str) -> list[docker.types.Mount]:
    # Volumes of the daemon alone: there is no way to name a path of its host.
    return [
        docker.types.Mount(
            target=volume.path,
            source=None if volume.name is None else volume_name(machine_id, volume.name),
            type="volume",
            read_only=volume.read_only,
        )
        for volume in volumes
    ]


def _healthcheck(check: Healthcheck) -> Options:
    nanoseconds = 10**9
    return {
        "test": ["CMD-SHELL", check.command],
        "interval": round(check.interval_s * nanoseconds),
        "timeout": round(check.timeout_s * nanoseconds),
        "start_period": round(check.start_period_s * nanoseconds),
        "retries": check.retries,
    }


def shared_hosts(services: Sequence[ServiceSpec]) -> dict[str, str]:
    """Return names of services that share a machine's network namespace, for its ``/etc/hosts``."""
    return {service.name: "127.0.0.1" for service in services}
