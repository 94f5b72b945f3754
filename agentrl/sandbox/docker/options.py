"""Options of a sandbox's container, from the configuration: every limit and all isolation."""

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
from agentrl.sandbox.runner_command import python_command
from agentrl.sandbox.seccomp import docker_profile

NOBODY = 65534
EGRESS_FOLDER = "/run/agentrl"
"""Where a container that starts sees the folder with the Unix socket to which it hands the proxy's listener."""
EGRESS_SOCKET = "egress.sock"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUNNER_PROCESSES = 1
"""The runner."""
SHARES = {WORK: (12, "0755"), "/tmp": (3, "1777"), "/dev/shm": (1, "1777")}
"""Writable folders: sixteenths of disk and inodes, and mode. Docker cannot mount one tmpfs in several places, so each has a
separate one; together they have what the limits allow."""
DEV = "ro,dev,nosuid,noexec,noatime,mode=0755,size=64k"
"""Devices, in place of those that Docker would mount: without pseudo-terminals, of which all sandboxes together have a few
thousand, and without times of access, which would tell a later call what an earlier one did."""
IPC = {"kernel.shm_rmid_forced": "1", "kernel.msgmni": "8", "fs.mqueue.queues_max": "8"}
"""Shared memory is removed with its last process, and few message queues can stay: what outlives a call's processes would
take memory from later calls."""
IMAGE_FOLDERS = ("dev", "proc", "sys", "work", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
"""Folders of the root that stay those of the image even if a sandbox sees the machine's files (`Defence.FILES` off)."""


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
        defences: those that are on.
        daemon: the daemon's ``info``.
        image: its ``inspect_image`` of the image.
        cgroup: parent of the containers' cgroups; None takes the daemon's default.
    """
    host = _host_options(config, defences, image)
    host["mounts"] = _mounts(config, defences, Path(daemon["DockerRootDir"]))
    if cgroup is not None:
        host["cgroup_parent"] = f"/{cgroup.strip('/')}"
    egress = f"{EGRESS_FOLDER}/{EGRESS_SOCKET}" if config.hosts else None
    command = python_command(config.python, config.limits, defences, egress=egress)
    user = NOBODY if Defence.PRIVILEGES in defences else 0
    return {
        "image": image["Id"],  # a tag may be moved to another image while the server runs
        "entrypoint": command[:1],
        "command": command[1:],
        "user": f"{user}:{user}",
        "hostname": "sandbox" if Defence.NETWORK in defences else None,
        "working_dir": WORK,
        "environment": _environment(image, defences) | (proxy_environment() if config.hosts else {}),
        "stdin_open": True,
        "tty": False,
        "stop_signal": "SIGKILL",  # the runner ignores all others, and a daemon that ends would wait for it
        "healthcheck": {"test": ["NONE"]},  # that of the image would start processes next to the runner
        "host_config": docker.types.HostConfig(version="1.41", **host),
    }


def with_egress(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `container_options`, changed for a sandbox that sees ``folder`` at `EGRESS_FOLDER`."""
    host = options["host_config"]
    mount: dict[str, Any] = docker.types.Mount(EGRESS_FOLDER, str(folder), type="bind", read_only=True)
    return {**options, "host_config": {**host, "Mounts": [*host.get("Mounts", []), mount]}}


def _environment(image: Mapping[str, Any], defences: frozenset[Defence]) -> dict[str, str | None]:
    image_variables = dict(line.partition("=")[::2] for line in image["Config"].get("Env") or ())
    sandbox_variables = {"PATH": image_variables.get("PATH", PATH), "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
    removed = dict.fromkeys(image_variables)  # None removes a variable
    return {**removed, **({} if Defence.ENVIRONMENT in defences else os.environ), **sandbox_variables}


def _host_options(config: SandboxConfig, defences: frozenset[Defence], image: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        # The runner itself has to be process 1, which no signal from inside reaches.
        "init": False,
        "log_config": docker.types.LogConfig(type="none"),
        "restart_policy": {"Name": "no"},
        "read_only": Defence.FILES in defences,
        "tmpfs": _tmpfs(config.limits, defences, image),
        "network_mode": "none" if Defence.NETWORK in defences else "host",
        "ipc_mode": "private" if Defence.PROCESS_NAMESPACE in defences else "host",
        "security_opt": [],
    }
    if Defence.KERNEL in defences and config.runtime is not None:
        options["runtime"] = config.runtime
    if Defence.PROCESS_NAMESPACE in defences:
        options["sysctls"] = IPC
    else:
        options["pid_mode"] = "host"
    if Defence.PRIVILEGES in defences:
        options["cap_drop"] = ["ALL"]
        options["security_opt"] += ["no-new-privileges"]
    else:
        options["cap_add"] = ["SYS_ADMIN", "SYS_PTRACE"]  # not ALL: some daemons do not have all themselves
    profile = docker_profile() if Defence.SECCOMP in defences else "unconfined"
    options["security_opt"] += [f"seccomp={profile}"]
    return options | _resources(config.limits, defences)


def _resources(limits: SandboxLimits, defences: frozenset[Defence]) -> dict[str, Any]:
    """Return the limits by cgroup. The runner sets those per process, which all its children inherit."""
    resources: dict[str, Any] = {}
    if Defence.MEMORY in defences:
        resources |= {"mem_limit": limits.memory_mb * 2**20, "memswap_limit": limits.memory_mb * 2**20}
    if Defence.PROCESSES in defences:
        resources["pids_limit"] = limits.processes + RUNNER_PROCESSES
    if Defence.CPU in defences:
        # Not nano_cpus: Docker refuses more than the machine has.
        resources |= {"cpu_period": PERIOD_US, "cpu_quota": max(1000, round(limits.cpus * PERIOD_US))}
    return resources


def _tmpfs(limits: SandboxLimits, defences: frozenset[Defence], image: Mapping[str, Any]) -> dict[str, str]:
    folders = {"/dev": DEV}
    for folder, (sixteenths, mode) in SHARES.items():
        if folder != WORK and Defence.FILES not in defences:
            continue
        # Explicit, since by default root would own it, and no program in it could run.
        options = ["rw", "exec", "nosuid", "nodev", "noatime", f"uid={NOBODY}", f"gid={NOBODY}", f"mode={mode}"]
        if Defence.DISK in defences:
            options.append(f"size={limits.disk_mb * 1024 * sixteenths // 16}k")
        if Defence.INODES in defences:
            options.append(f"nr_inodes={limits.inodes * sixteenths // 16}")
        folders[folder] = ",".join(options)
    if Defence.FILES in defences:
        # Volumes declared by the image would be folders on the machine's disk, without a limit.
        folders |= dict.fromkeys(image["Config"].get("Volumes") or (), "ro,size=4k,nr_inodes=2")
    return folders


def _mounts(config: SandboxConfig, defences: frozenset[Defence], docker_root: Path) -> list[dict[str, Any]]:
    mounts = [_bind(path, read_only=True) for path in config.readonly]
    if Defence.FILES not in defences:
        folders = [path for path in sorted(Path("/").iterdir()) if path.name not in IMAGE_FOLDERS]
        mounts += [_bind(path, read_only=False) for folder in folders for path in _paths_without(docker_root, folder)]
    return mounts


def _paths_without(hidden: Path, path: Path) -> list[Path]:
    """Return a folder, or its entries without ``hidden``: Docker refuses to mount its own folder."""
    if path.is_symlink() or path == hidden or not (path.is_dir() or path.is_file()):
        return []
    if not hidden.is_relative_to(path):
        return [path]
    return [shown for child in sorted(path.iterdir()) for shown in _paths_without(hidden, child)]


def _bind(path: Path, *, read_only: bool) -> dict[str, Any]:
    mount: dict[str, Any] = docker.types.Mount(str(path), str(path), type="bind", read_only=read_only)
    # Without mounts below it: Docker before 25 would leave those writable.
    mount["BindOptions"] = {"Propagation": "rprivate", "NonRecursive": True}
    return mount
