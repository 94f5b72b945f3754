"""Control groups of sandboxes: limits over all processes of a sandbox, the count of memory kills, killing them all.

Both versions of the kernel's interface occur, also mixed: each controller is in one of them. The layout is
``<controller>/<parent>/agentrl/<server>/<sandbox>``. ``<server>`` identifies a process by id, start time and PID namespace,
so that the next start recognizes the groups of a server that died.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.sandbox import SandboxLimits
from agentrl.sandbox.base import Defence

CONTROLLERS = ("memory", "pids", "cpu")
CGROUP_VARIABLE = "AGENTRL_CGROUP"
"""Environment variable with the parent of all sandboxes' cgroups, relative to the mount; for a delegated cgroup."""
PERIOD_US = 100_000
SOCKETS_FILE = "memory.kmem.tcp.limit_in_bytes"
SOCKETS_SHARE = 4
"""Version 1 counts the memory of TCP and UDP sockets apart from all other memory: it may be one part in so many of the limit."""
RUNNER_PROCESSES = 2
"""The runner, and bubblewrap's process that waits for it; the limit of processes does not count them."""
LEAF = "agentrl-server"
"""Child group for the processes of a delegated group of version 2, the server included: only leaves may have processes."""
REMOVE_S = 10.0
"""How long killed processes may take to end; the kernel needs a while to free a large memory."""


class CgroupError(Exception):
    """No cgroup can be created here; the message states what is missing."""


def server_name(pid: int | None = None) -> str:
    """Return a name of the server with this process id (None: this process) that is unique on this machine."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}-{_start_time(pid)}-{_pid_namespace()}"


def server_gone(name: str) -> bool:
    """Return whether the server of this name has ended. False for any other name, and for other PID namespaces."""
    pid, started, namespace, *_ = [*name.split("-"), "", ""]
    if not (pid.isdecimal() and started.isdecimal()) or namespace != _pid_namespace():
        return False
    try:
        return _start_time(int(pid)) != started
    except (FileNotFoundError, ProcessLookupError):
        return True


def _start_time(pid: int) -> str:
    # The name of the program is in brackets and may hold anything; field 22 is the 20th after it.
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


@dataclass(frozen=True, slots=True)
class Mounts:
    """Mount points of the kernel's interfaces."""

    v1: Mapping[str, Path]
    """Mount point by controller, of version 1."""
    v2: Path | None
    """Mount point of version 2."""


def parse_mounts(text: str) -> Mounts:
    """Parse the cgroup mounts in ``/proc/self/mounts``."""
    v1: dict[str, Path] = {}
    v2 = None
    for line in text.splitlines():
        _, folder, kind, options = line.split()[:4]
        path = Path(folder.replace("\\040", " "))
        if kind == "cgroup2":
            v2 = v2 or path
        elif kind == "cgroup":
            v1 |= {name: path for name in options.split(",") if name in CONTROLLERS and name not in v1}
    return Mounts(v1, v2)


def parse_own(text: str) -> str:
    """Return this process's cgroup of version 2, relative to the mount, from ``/proc/self/cgroup``."""
    for line in text.splitlines():
        if line.startswith("0::"):
            return line[3:].strip("/")
    return ""


def parse_count(text: str, key: str) -> int:
    """Return the number after a key in ``memory.oom_control``, ``memory.events`` or ``/proc/vmstat``; 0 without the key."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def sockets_bytes(limits: SandboxLimits) -> int:
    """Return the limit of sockets' memory on version 1; version 2 counts it with all other memory."""
    return limits.memory_mb * 2**20 // SOCKETS_SHARE


def settings_v1(limits: SandboxLimits, defences: frozenset[Defence]) -> dict[str, dict[str, str]]:
    """Return the files to write, by controller; in order, since the memory limit must not exceed that with swap."""
    memory, quota = str(limits.memory_mb * 2**20), str(max(1000, round(limits.cpus * PERIOD_US)))
    files: dict[str, dict[str, str]] = {name: {} for name in CONTROLLERS}
    if Defence.MEMORY in defences:
        files["memory"] = {
            "memory.limit_in_bytes": memory,
            "memory.memsw.limit_in_bytes": memory,
            SOCKETS_FILE: str(sockets_bytes(limits)),
        }
    if Defence.PROCESSES in defences:
        files["pids"] = {"pids.max": str(limits.processes + RUNNER_PROCESSES)}
    if Defence.CPU in defences:
        files["cpu"] = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    return files


def settings_v2(limits: SandboxLimits, defences: frozenset[Defence]) -> dict[str, dict[str, str]]:
    """Return the files to write, by controller. When out of memory, one process is killed and not the whole group."""
    files: dict[str, dict[str, str]] = {name: {} for name in CONTROLLERS}
    if Defence.MEMORY in defences:
        memory = str(limits.memory_mb * 2**20)
        files["memory"] = {"memory.max": memory, "memory.swap.max": "0", "memory.oom.group": "0"}
    if Defence.PROCESSES in defences:
        files["pids"] = {"pids.max": str(limits.processes + RUNNER_PROCESSES)}
    if Defence.CPU in defences:
        files["cpu"] = {"cpu.max": f"{max(1000, round(limits.cpus * PERIOD_US))} {PERIOD_US}"}
    return files


_trees = itertools.count(1)
OPTIONAL = frozenset({"memory.memsw.limit_in_bytes", "memory.swap.max", "memory.oom.group"})
"""Files that a kernel without swap accounting, or an old one, does not have."""


@dataclass(slots=True)
class Cgroup:
    """The groups of one sandbox, one folder per hierarchy."""

    folders: list[Path] = field(default_factory=list)
    oom_file: Path | None = None
    kill_file: Path | None = None

    @property
    def joins(self) -> list[Path]:
        """Files to which a process writes 0 to join the groups, with all its future children."""
        return [folder / "cgroup.procs" for folder in self.folders]

    def oom_kills(self) -> int:
        """Return how many processes were killed for lack of memory; 0 once the group is removed."""
        if self.oom_file is None:
            return 0
        try:
            return parse_count(self.oom_file.read_text(), "oom_kill")
        except FileNotFoundError:
            return 0

    def kill(self) -> None:
        """Kill every process in the groups."""
        if self.kill_file is not None:
            with contextlib.suppress(FileNotFoundError):
                self.kill_file.write_text("1")
            return
        for folder in self.folders:
            _kill_members(folder)

    def remove(self) -> bool:
        """Remove the groups whose processes are gone. Returns whether none is left."""
        for folder in list(self.folders):
            if _remove(folder):
                self.folders.remove(folder)
        return not self.folders


class CgroupTree:
    """The groups of this server, and those that servers that died left behind.

    Args:
        parents: by controller, the folder below which groups are created.
        unified: the folder of version 2, for ``cgroup.kill``, whether or not it has controllers.
    """

    def __init__(self, parents: Mapping[str, Path], unified: Path | None) -> None:
        self._v1 = {name: path for name, path in parents.items() if path != unified}
        self._v2 = unified
        self._unified_controllers = [name for name, path in parents.items() if path == unified]
        self.server = f"{server_name()}-{next(_trees)}"  # a process may have several trees
        """Name of the folder that holds the groups of this tree."""

    @property
    def _tops(self) -> list[Path]:
        parents = [*self._v1.values(), *([self._v2] if self._v2 is not None else [])]
        return [parent / "agentrl" for parent in dict.fromkeys(parents)]

    def start(self) -> None:
        """Create the server's groups.

        Raises:
            CgroupError: not permitted.
        """
        try:
            for top in self._tops:
                (top / self.server).mkdir(parents=True, exist_ok=True)
            if self._v2 is not None and self._unified_controllers:
                _move_processes(self._v2, self._unified_controllers)
                for folder in (self._v2, self._v2 / "agentrl", self._v2 / "agentrl" / self.server):
                    _enable(folder, self._unified_controllers)
        except OSError as error:
            self.close()
            raise CgroupError(f"{error.filename}: {error.strerror}") from error

    def create(self, name: str, limits: SandboxLimits, defences: frozenset[Defence]) -> Cgroup:
        """Create the groups of a sandbox, with its limits.

        Raises:
            OSError: the kernel refuses; no group is left then.
        """
        group = Cgroup()
        v1, v2 = settings_v1(limits, defences), settings_v2(limits, defences)
        try:
            for controller, parent in self._v1.items():
                folder = self._folder(group, parent, name)
                _write(folder, v1[controller])
                if controller == "memory":
                    group.oom_file = folder / "memory.oom_control"
            if self._v2 is not None:
                folder = self._folder(group, self._v2, name)
                for controller in self._unified_controllers:
                    _write(folder, v2[controller])
                if "memory" in self._unified_controllers:
                    group.oom_file = folder / "memory.events"
                if (folder / "cgroup.kill").exists():
                    group.kill_file = folder / "cgroup.kill"
        except BaseException:
            group.remove()
            raise
        return group

    def _folder(self, group: Cgroup, parent: Path, name: str) -> Path:
        folder = parent / "agentrl" / self.server / name
        if folder not in group.folders:
            folder.mkdir()
            group.folders.append(folder)
        return folder

    def reap(self) -> list[str]:
        """Kill the processes and remove the groups of servers that died; return the servers' names."""
        names = {folder.name for top in self._tops for folder in _groups(top)}
        dead_servers = sorted(name for name in names if server_gone(name))
        for name in dead_servers:
            self._end([top / name for top in self._tops])
        return dead_servers

    def close(self) -> None:
        """Kill the processes in the server's groups, and remove the groups."""
        self._end([top / self.server for top in self._tops])

    def _end(self, servers: list[Path]) -> None:
        folders = [folder for server in servers for folder in _groups(server)]
        deadline = time.monotonic() + REMOVE_S
        while folders and time.monotonic() < deadline:
            for folder in folders:
                _kill_members(folder)
            folders = [folder for folder in folders if not _remove(folder)]
            if folders:
                time.sleep(0.005)
        for server in servers:
            _remove(server)


def find_tree(parent: str | None = None) -> CgroupTree:
    """Find where this process may create groups, and return a tree there.

    Args:
        parent: path of the parent group, relative to each mount. None takes the root; if this user may not write to it,
            this process's group of version 2.

    Raises:
        CgroupError: memory or the number of processes cannot be limited here.
    """
    mounts = parse_mounts(Path("/proc/self/mounts").read_text())
    relative = "" if parent is None else parent.strip("/")
    unified = None
    if mounts.v2 is not None:
        unified = mounts.v2 / relative
        if parent is None and not os.access(unified, os.W_OK):
            unified = mounts.v2 / parse_own(Path("/proc/self/cgroup").read_text()).removesuffix(LEAF)
    unified_controllers = _controllers(unified)
    parents: dict[str, Path] = {}
    for controller in CONTROLLERS:
        if controller in unified_controllers and unified is not None:
            parents[controller] = unified
        elif controller in mounts.v1:
            parents[controller] = mounts.v1[controller] / relative
    if parent is not None and not all(path.is_dir() for path in parents.values()):
        raise CgroupError(f"no cgroup {parent}")
    missing_controllers = [name for name in CONTROLLERS if name not in parents]
    if missing_controllers:
        raise CgroupError(f"no cgroup controller for {', '.join(missing_controllers)}")
    return CgroupTree(parents, unified if unified is not None and os.access(unified, os.W_OK) else None)


def _controllers(folder: Path | None) -> Iterable[str]:
    if folder is None:
        return ()
    try:
        return (folder / "cgroup.controllers").read_text().split()
    except FileNotFoundError:
        return ()


def _groups(folder: Path) -> list[Path]:
    """Return the child groups; another server's start may be removing them."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []


def _enable(folder: Path, controllers: list[str]) -> None:
    disabled = [name for name in controllers if name not in (folder / "cgroup.subtree_control").read_text().split()]
    if disabled:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in disabled))


def _move_processes(folder: Path, controllers: list[str]) -> None:
    """Move a group's processes into a child group: otherwise its controllers cannot be enabled for children."""
    disabled = [name for name in controllers if name not in (folder / "cgroup.subtree_control").read_text().split()]
    if not disabled or not (folder / "cgroup.type").exists():  # the root has no such file, and may have processes
        return
    (folder / LEAF).mkdir(exist_ok=True)
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (folder / LEAF / "cgroup.procs").write_text(pid)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, value in files.items():
        if name in OPTIONAL and not (folder / name).exists():
            continue
        (folder / name).write_text(value)


def _kill_members(folder: Path) -> None:
    try:
        pids = [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return
    for pid in pids:
        if pid > 1:  # 0 stands for a process in a PID namespace that is not visible here
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
