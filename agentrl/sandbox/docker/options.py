"""What Docker is told about a sandbox's container: every limit and wall, from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.sandbox.base import WORK, Defence
from agentrl.sandbox.cgroup import PERIOD_US
from agentrl.sandbox.egress import proxy_environment
from agentrl.sandbox.runner_sandbox import python_command
from agentrl.sandbox.seccomp import docker_profile

NOBODY = 65534
WAY_OUT = "/run/agentrl"
"""Where a container sees the folder with the Unix socket that takes its way out, while it starts."""
WAY_OUT_SOCKET = "egress.sock"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OWN_PROCESSES = 1
"""The runner."""
SHARES = {WORK: (12, "0755"), "/tmp": (3, "1777"), "/dev/shm": (1, "1777")}
"""Folders that code may write to: sixteenths of disk and inodes, and mode. Docker cannot mount one tmpfs in several
places, so each has its own; together they have what the limits say, but none of them has all of it."""
IPC = {"kernel.shm_rmid_forced": "1", "kernel.msgmni": "8", "fs.mqueue.queues_max": "8"}
"""Shared memory goes with its last process, and few message queues can stay: what outlives a call's processes would fill
the memory of the calls after it."""
OWN_FOLDERS = ("dev", "proc", "sys", "work", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
"""Folders of the root that stay the image's even where a sandbox is to see the machine's files."""


def container_options(
    config: SandboxConfig,
    defences: frozenset[Defence],
    daemon: Mapping[str, Any],
    image: Mapping[str, Any],
    cgroup: str | None,
) -> dict[str, Any]:
    """Return the arguments of `docker.APIClient.create_container` that are the same for every sandbox.

    Args:
        config: the sandbox section.
        defences: those that stand.
        daemon: what the daemon says of itself.
        image: what it says of the image.
        cgroup: the group above the container's; None takes the daemon's.
    """
    host = _host_options(config, defences, image)
    host["mounts"] = _mounts(config, defences, Path(daemon["DockerRootDir"]))
    if cgroup is not None:
        host["cgroup_parent"] = f"/{cgroup.strip('/')}"
    way_out = f"{WAY_OUT}/{WAY_OUT_SOCKET}" if config.hosts else None
    command = python_command(config.python, config.limits, defences, egress=way_out)
    user = NOBODY if Defence.PRIVILEGES in defences else 0
    return {
        "image": image["Id"],  # a tag may come to name another image while we run
        "entrypoint": command[:1],
        "command": command[1:],
        "user": f"{user}:{user}",
        "hostname": "sandbox" if Defence.NETWORK in defences else None,
        "working_dir": WORK,
        "environment": _environment(image, defences) | (proxy_environment() if config.hosts else {}),
        "stdin_open": True,
        "tty": False,
        "stop_signal": "SIGKILL",  # the runner hears no other, and a daemon that ends would wait for it
        "healthcheck": {"test": ["NONE"]},  # the image's own would start processes beside the runner
        "host_config": docker.types.HostConfig(version="1.41", **host),
    }


def with_way_out(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what `container_options` returned for one sandbox that finds ``folder`` at `WAY_OUT`."""
    host = options["host_config"]
    mount: dict[str, Any] = docker.types.Mount(WAY_OUT, str(folder), type="bind", read_only=True)
    return {**options, "host_config": {**host, "Mounts": [*host.get("Mounts", []), mount]}}


def _environment(image: Mapping[str, Any], defences: frozenset[Defence]) -> dict[str, str | None]:
    theirs = dict(line.partition("=")[::2] for line in image["Config"].get("Env") or ())
    ours = {"PATH": theirs.get("PATH", PATH), "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    # None takes a variable of the image's away.
    removed = dict.fromkeys(theirs)
    return {**removed, **({} if Defence.ENVIRONMENT in defences else os.environ), **ours}


def _host_options(config: SandboxConfig, defences: frozenset[Defence], image: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        # The runner has to be process 1 itself: no signal from inside reaches that one.
        "init": False,
        "log_config": docker.types.LogConfig(type="none"),
        "restart_policy": {"Name": "no"},
        "read_only": Defence.FILES in defences,
        "tmpfs": _tmpfs(config.limits, defences, image),
        "network_mode": "none" if Defence.NETWORK in defences else "host",
        "ipc_mode": "private" if Defence.PROCESS_NAMESPACE in defences else "host",
        "security_opt": [],
    }
    if Defence.PROCESS_NAMESPACE in defences:
        options["sysctls"] = IPC
    else:
        options["pid_mode"] = "host"
    if Defence.PRIVILEGES in defences:
        options["cap_drop"] = ["ALL"]
        options["security_opt"] += ["no-new-privileges"]
    else:
        options["cap_add"] = ["SYS_ADMIN", "SYS_PTRACE"]  # not ALL, which not every daemon has itself
    profile = docker_profile() if Defence.SECCOMP in defences else "unconfined"
    options["security_opt"] += [f"seccomp={profile}"]
    return options | _resources(config.limits, defences)


def _resources(limits: SandboxLimits, defences: frozenset[Defence]) -> dict[str, Any]:
    """Return what cgroups bound. The limits of a process are the runner's to set, and all its children inherit them."""
    resources: dict[str, Any] = {}
    if Defence.MEMORY in defences:
        resources |= {"mem_limit": limits.memory_mb * 2**20, "memswap_limit": limits.memory_mb * 2**20}
    if Defence.PROCESSES in defences:
        resources["pids_limit"] = limits.processes + OWN_PROCESSES
    if Defence.CPU in defences:
        # Not nano_cpus, which Docker refuses where it is more than the machine has.
        resources |= {"cpu_period": PERIOD_US, "cpu_quota": max(1000, round(limits.cpus * PERIOD_US))}
    return resources


def _tmpfs(limits: SandboxLimits, defences: frozenset[Defence], image: Mapping[str, Any]) -> dict[str, str]:
    folders = {}
    for folder, (sixteenths, mode) in SHARES.items():
        if folder != WORK and Defence.FILES not in defences:
            continue
        # Spelled out: by default it would belong to root, and no program in it could run.
        options = ["rw", "exec", "nosuid", "nodev", f"uid={NOBODY}", f"gid={NOBODY}", f"mode={mode}"]
        if Defence.DISK in defences:
            options.append(f"size={limits.disk_mb * 1024 * sixteenths // 16}k")
        if Defence.INODES in defences:
            options.append(f"nr_inodes={limits.inodes * sixteenths // 16}")
        folders[folder] = ",".join(options)
    if Defence.FILES in defences:
        # A volume that the image declares would be a folder on the machine's disk, without any limit.
        folders |= dict.fromkeys(image["Config"].get("Volumes") or (), "ro,size=4k,nr_inodes=2")
    return folders


def _mounts(config: SandboxConfig, defences: frozenset[Defence], docker_root: Path) -> list[dict[str, Any]]:
    mounts = [_bind(path, read_only=True) for path in config.readonly]
    if Defence.FILES not in defences:
        folders = [path for path in sorted(Path("/").iterdir()) if path.name not in OWN_FOLDERS]
        mounts += [_bind(path, read_only=False) for folder in folders for path in _without(docker_root, folder)]
    return mounts


def _without(hidden: Path, path: Path) -> list[Path]:
    """Return a folder, or all that is in it but Docker's own, which Docker shows nobody."""
    if path.is_symlink() or path == hidden or not (path.is_dir() or path.is_file()):
        return []
    if not hidden.is_relative_to(path):
        return [path]
    return [shown for child in sorted(path.iterdir()) for shown in _without(hidden, child)]


def _bind(path: Path, *, read_only: bool) -> dict[str, Any]:
    mount: dict[str, Any] = docker.types.Mount(str(path), str(path), type="bind", read_only=read_only)
    # Mounts below it stay out: Docker before 25 would leave those writable.
    mount["BindOptions"] = {"Propagation": "rprivate", "NonRecursive": True}
    return mount
