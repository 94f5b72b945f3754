"""The outer world: cgroup limits, namespaces and read-only files around everything that attacks, controls included.

Out here it is made, by `launch`; `enter` finishes it from inside, and `prove` tries whether it holds. Nothing is attacked
where it does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sandbox import SandboxLimits
from agentrl.sandbox.base import ALL_DEFENCES
from agentrl.sandbox.cgroup import Cgroup, CgroupError, CgroupTree, find_tree, parse_mounts, server_gone

MEMORY_MB = 1024
PROCESSES = 600
NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")
TASKS = 20
"""What all in here together is worth in cores: on a busy machine a single task's share would be too little for some
controls."""
DROPPED = ("sys_time", "sys_module", "sys_boot", "sys_rawio")
"""Capabilities that no namespace holds back."""
USR = "/usr/src"
"""In here a fresh tmpfs that everybody may write to: a folder of programs that only a read-only mount protects."""
OUTSIDE = "192.0.2.1"
"""An address for documentation (RFC 5737); in here it is one of the loopback's."""
TESTS = Path(__file__).resolve().parent.parent
HOSTNAME = "/proc/sys/kernel/hostname"
"""A kernel setting that a namespace of the outer world holds; the only one that may be written."""
_MOUNT_SETATTR = 442
_RDONLY = 1


class NoOuterWorld(Exception):
    """None can be made on this machine; says why."""


@dataclass(frozen=True, slots=True)
class Outer:
    """What `launch` tells the driver of its world."""

    cgroup: str
    """The group that holds everything, relative to every controller's mount."""
    folders: tuple[str, ...]
    """The same as folders, one a hierarchy; all that may be written of the kernel's files."""
    namespaces: Mapping[str, int]
    """Those that the driver must have left."""

    def __str__(self) -> str:
        return json.dumps({"cgroup": self.cgroup, "folders": self.folders, "namespaces": dict(self.namespaces)})

    @classmethod
    def parse(cls, text: str) -> Outer:
        """Read what `__str__` wrote."""
        fields = json.loads(text)
        return cls(fields["cgroup"], tuple(fields["folders"]), fields["namespaces"])


def namespaces() -> dict[str, int]:
    """Return this process's namespaces, by number."""
    return {name: Path(f"/proc/self/ns/{name}").stat().st_ino for name in NAMESPACES}


@contextlib.contextmanager
def open_tree() -> Iterator[CgroupTree]:
    """Give the place for the groups of outer worlds; several can be in it at once.

    Raises:
        NoOuterWorld: not root, or no cgroups, or a program is missing.

    """
    if os.geteuid() != 0:
        raise NoOuterWorld("attacks and their controls run in namespaces and cgroups that only root can make")
    missing_names = [name for name in ("unshare", "setpriv", "bwrap") if shutil.which(name) is None]
    if missing_names:
        raise NoOuterWorld(f"not installed: {', '.join(missing_names)}")
    try:
        tree = find_tree()
        tree.start()
    except CgroupError as error:
        raise NoOuterWorld(str(error)) from error
    mounts = parse_mounts(Path("/proc/self/mounts").read_text())
    tops = [top / "agentrl" for top in (*mounts.v1.values(), mounts.v2) if top is not None]
    _remove_left()
    _weigh(tops, times=TASKS)
    try:
        yield tree
    finally:
        tree.close()
        for top in _hierarchies():
            with contextlib.suppress(OSError):
                (top / "agentrl" / tree.server).rmdir()
        if not any(list(top.glob("*/attacks-*")) for top in tops):  # another run of these tests
            _weigh(tops, times=1)


@contextlib.contextmanager
def launch(tree: CgroupTree, module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a module of the tests in an outer world of its own. Its first argument is the `Outer`."""
    group = Cgroup()
    try:
        limits = SandboxLimits(memory_mb=MEMORY_MB, processes=PROCESSES, cpus=float(os.cpu_count() or 1))
        group = tree.create(f"attacks-{uuid.uuid4().hex[:8]}", limits, ALL_DEFENCES)
        relative = _add_hierarchies(group)
        _weigh([level for folder in group.folders for level in (folder.parent, folder)], times=TASKS)
        outer = Outer(relative, tuple(map(str, group.folders)), namespaces())
        yield from _run(group, [module, str(outer), *arguments])
    finally:
        _remove(group)


def _weigh(folders: list[Path], times: int) -> None:
    """Let groups count for so many others when cores are shared out."""
    for folder in folders:
        for name, usual in (("cpu.shares", 1024), ("cpu.weight", 100)):
            if (folder / name).exists():
                (folder / name).write_text(str(times * usual))


def _run(group: Cgroup, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    drivers = [folder / "driver" for folder in group.folders]
    command = [
        "/bin/sh",
        "-c",
        'while [ "$1" != -- ]; do echo 0 > "$1" || exit 96; shift; done; shift; exec "$@"',
        "sh",
    ]
    command += [*(str(folder / "cgroup.procs") for folder in drivers), "--"]
    command += ["setpriv", "--bounding-set", ",".join(f"-{name}" for name in DROPPED)]
    command += ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"]
    command += ["--net", "--ipc", "--uts", sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
            start_new_session=True,
        )
        try:
            yield process
            if process.wait(60) != 0:
                errors.seek(0)
                raise AssertionError(f"the driver ended with {process.returncode}: {errors.read()[-4000:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _remove_left() -> None:
    """Remove the groups of test runs that were killed."""
    for top in _hierarchies():
        for folder in top.glob("agentrl/*/attacks-*"):
            if server_gone(folder.parent.name):
                _remove(Cgroup([folder]))
                with contextlib.suppress(OSError):
                    folder.parent.rmdir()


def _hierarchies() -> list[Path]:
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(folder) for folder, kind in mounts if kind in ("cgroup", "cgroup2")]


def _add_hierarchies(group: Cgroup) -> str:
    """Make the group in the hierarchies that have no limits of ours too: Docker joins them all. Returns its path."""
    tops = _hierarchies()
    first = next(folder for folder in group.folders if any(folder.is_relative_to(top) for top in tops))
    relative = next(first.relative_to(top) for top in tops if first.is_relative_to(top))
    for top in tops:
        if not (top / relative).exists() and os.access(top, os.W_OK):
            (top / relative).mkdir(parents=True)
            group.folders.append(top / relative)
        driver = relative / "driver"  # a group of version 2 that has groups has no processes of its own
        if (top / relative).exists():
            (top / driver).mkdir()
        if (top / "cpuset.cpus").exists():
            below = [*reversed(list(driver.parents)[:-1]), driver]
            for folder in (top / level for level in below):
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (folder / name).write_text((folder.parent / name).read_text())
    return str(relative)


def _remove(group: Cgroup) -> None:
    """Kill the processes left in the groups and remove the groups, inner ones first.

    The server's folder above them stays until `open_tree` ends: another world may be about to make its group there.
    """
    deadline = time.monotonic() + 20
    tops = list(group.folders)
    while any(top.exists() for top in tops):
        for top in tops:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(FileNotFoundError):
                    for pid in map(int, (Path(folder) / "cgroup.procs").read_text().split()):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        assert time.monotonic() < deadline, f"cgroups remain: {tops}"
        time.sleep(0.01)


# ---- inside --------------------------------------------------------------------------------------------------------


def enter(outer: Outer) -> Path:
    """Make every file read-only but a fresh tmpfs, and give the loopback addresses. Returns that tmpfs.

    Raises:
        NoOuterWorld: the kernel is too old for it.

    """
    unchanged = {name for name, number in namespaces().items() if number != outer.namespaces[name]}
    if unchanged != set(NAMESPACES):
        raise NoOuterWorld(f"the driver is in the machine's own namespaces: {sorted(set(NAMESPACES) - unchanged)}")
    used = [TESTS, Path(sys.prefix), Path(sys.base_prefix)]
    root = next(
        path
        for path in map(Path, ("/mnt", "/media", "/srv"))
        if path.is_dir() and not any(u.is_relative_to(path) for u in used)
    )
    _attributes("/", set_=_RDONLY, recursive=True)
    _attributes("/proc", clear=_RDONLY)
    for path, set_, clear in (("/proc/sys", _RDONLY, 0), (HOSTNAME, 0, _RDONLY)):
        _mount(path, path, None, 0x1000)  # MS_BIND
        _attributes(path, set_=set_, clear=clear)
    for folder in outer.folders:
        _mount(folder, folder, None, 0x1000)  # MS_BIND
        _attributes(folder, clear=_RDONLY)
    _mount("outer", str(root), "tmpfs", 0, "mode=0755,size=1g")
    _mount("outer", "/run", "tmpfs", 0, "mode=0755,size=64m")
    _mount("outer", USR, "tmpfs", 0, "mode=0777,size=1m")
    for name in ("upper", "work", "tmp", "proc"):
        (root / name).mkdir()
    # A user namespace may mount a /proc of its own only where there is one without anything mounted over it.
    _mount("outer", str(root / "proc"), "proc", 0)
    _mount("outer", "/etc", "overlay", 0, f"lowerdir=/etc,upperdir={root}/upper,workdir={root}/work")
    os.environ["TMPDIR"] = tempfile.tempdir = str(root / "tmp")
    (root / "tmp").chmod(0o1777)
    _addresses()
    return root


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode())
        != 0
    ):
        raise NoOuterWorld(f"mount {kind or 'bind'} at {target}: {os.strerror(ctypes.get_errno())}")


def _attributes(path: str, set_: int = 0, clear: int = 0, *, recursive: bool = False) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = struct.pack("4Q", set_, clear, 0, 0)
    flags = 0x8000 if recursive else 0
    if libc.syscall(_MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.c_size_t(32)) != 0:
        raise NoOuterWorld(f"mount_setattr at {path} (Linux 5.12 has it): {os.strerror(ctypes.get_errno())}")


def _addresses() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton(OUTSIDE))
        fcntl.ioctl(control, 0x8914, struct.pack("16sH14x", b"lo", 0x49))  # SIOCSIFFLAGS: up, running
        fcntl.ioctl(control, 0x8916, address)  # SIOCSIFADDR


def prove(outer: Outer) -> dict[str, bool]:
    """Try whether the limits hold. What is false here must not run a control."""
    is_private = {name: number != outer.namespaces[name] for name, number in namespaces().items()}
    with open("/proc/self/status") as file:
        bound = next(int(line.split()[1], 16) for line in file if line.startswith("CapBnd"))
    return {
        **{f"own {name} namespace": is_own for name, is_own in is_private.items()},
        "only a loopback": [name for _, name in socket.if_nameindex() if not _unused(name)] == ["lo"],
        "files are read-only": all(map(_read_only, ("/usr", "/", str(TESTS), str(Path.home()), "/sys/fs/cgroup"))),
        "kernel settings are read-only": _refused("/proc/sys/kernel/core_pattern"),
        "few capabilities": not any(bound >> number & 1 for number in (25, 16, 22, 17)),
        "memory is limited": _in_child(_eat) == -signal.SIGKILL,
        "processes are limited": _in_child(_fork) == 0,
    }


def _unused(name: str) -> bool:
    """Say whether it is one of the tunnels that some kernels put, switched off, into every network namespace."""
    return name != "lo" and not int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & 1


def _read_only(folder: str) -> bool:
    path = Path(folder) / f"agentrl-{uuid.uuid4().hex}"
    try:
        path.mkdir()
    except OSError as error:
        return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    path.rmdir()
    return False


def _refused(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return True
    return False


def _in_child(action: object) -> int:
    assert callable(action)
    pid = os.fork()
    if pid == 0:
        try:
            Path("/proc/self/oom_score_adj").write_text("1000")
            os._exit(action())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _eat() -> int:
    """Use twice the memory, with an end to it should nothing stop it."""
    hold = []
    for _ in range(2 * MEMORY_MB // 64):
        hold.append(b"x" * (64 << 20))
    return 1


def _fork() -> int:
    """Start twice the processes, as threads, which count the same."""
    threading.stack_size(65536)
    try:
        for _ in range(2 * PROCESSES):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    except RuntimeError:
        return 0
    return 1
