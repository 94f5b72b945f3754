"""The backend ``bubblewrap``: private namespaces, a cgroup, and a system call filter per sandbox; no daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from typing_extensions import override

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import raise_file_limit
from agentrl.core.errors import MissingError, SandboxFailure, SandboxKilledError
from agentrl.sandbox.base import ALL_DEFENCES, Defence
from agentrl.sandbox.bubblewrap.options import ETC, check_paths, command, find_programs, host_user, server_environment
from agentrl.sandbox.cgroup import CGROUP_VARIABLE, Cgroup, CgroupError, CgroupTree, find_tree
from agentrl.sandbox.egress import EgressProxy, own_address, receive_listener
from agentrl.sandbox.runner_sandbox import RunnerBackend, RunnerSandbox, open_pipes
from agentrl.sandbox.seccomp import bpf_program

_log = logging.getLogger(__name__)

STDERR_BYTES = 2048
"""Bytes of bubblewrap's error output that messages quote."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit statuses of a bubblewrap that was killed, and of one whose runner was."""
END_S = 10.0
"""How long killed processes may take to be gone; a large memory takes the kernel a while."""
HINT = (
    "It needs user namespaces, which an ordinary container does not have, nor Ubuntu without "
    "kernel.apparmor_restrict_unprivileged_userns=0"
)


class BubblewrapSandbox(RunnerSandbox):
    """A bubblewrap process, its cgroup, and its error output."""

    process: subprocess.Popen[bytes]
    cgroup: Cgroup
    stderr: int
    egress_channel: socket.socket | None = None
    proxy: EgressProxy | None = None

    async def start_egress(self, hosts: Sequence[str], origin: str | None) -> None:
        """Start the proxy to ``hosts`` and ``origin``, if egress is allowed. The runner must be ready."""
        if self.egress_channel is not None:
            with self.egress_channel:
                listener = receive_listener(self.egress_channel)
            self.proxy = EgressProxy(hosts, origin)
            await self.proxy.start(listener)

    def _oom_kills(self) -> int:
        return self.cgroup.oom_kills()

    async def _destroy(self) -> None:
        try:
            if self.egress_channel is not None:
                self.egress_channel.close()
            if self.proxy is not None:
                await self.proxy.close()
            await end_processes(self.process, self.cgroup)
        finally:
            os.close(self.stderr)

    async def _describe_end(self) -> str:
        for _ in range(20):  # the pipe closes a moment before the process ends
            if self.process.poll() is not None:
                size = os.fstat(self.stderr).st_size
                tail = os.pread(self.stderr, STDERR_BYTES, max(0, size - STDERR_BYTES)).decode("utf-8", "replace")
                return f"exit status {self.process.returncode}" + (f": {tail.strip()}" if tail.strip() else "")
            await asyncio.sleep(0.01)
        return ""


async def end_processes(process: subprocess.Popen[bytes], group: Cgroup) -> None:
    """End every process of a sandbox, and remove its cgroup."""
    process.kill()
    clock = asyncio.get_running_loop().time
    deadline, pause = clock() + END_S, 0.001
    while True:
        group.kill()
        ended, removed = process.poll() is not None, group.remove()
        if ended and removed:
            return
        if clock() > deadline:
            _log.error(
                "a sandbox could not be removed whole; left: %s", [*group.folders, *([] if ended else [process.pid])]
            )
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.05)


class BubblewrapBackend(RunnerBackend[BubblewrapSandbox]):
    """Runs each sandbox in private namespaces, by ``bwrap``; the parent of their cgroups is the value of `CGROUP_VARIABLE`."""

    name: ClassVar[str] = "bubblewrap"

    def __init__(self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES) -> None:
        super().__init__(config, defences)
        self._tree: CgroupTree | None = None
        self._origin: str | None = None
        self._files: dict[str, int] = {}
        self._user_numbers = itertools.count(secrets.randbits(24))

    @override
    def forward(self, host: str) -> str:
        self._origin = host
        return own_address()

    @classmethod
    def check(cls, config: SandboxConfig) -> None:
        """Check that bubblewrap and the interpreter are installed."""
        if shutil.which("bwrap") is None:
            raise MissingError(
                "sandbox.backend=bubblewrap, but there is no bwrap here: install the system's package 'bubblewrap', or set "
                "sandbox.backend=docker, or tools.NAME.url to a server elsewhere"
            )
        if shutil.which(config.python) is None:
            raise MissingError(f"sandbox.python={config.python}: there is no such program here")

    async def start(self) -> None:
        """Remove what servers that died have left, and open a first sandbox to check that it works."""
        self._programs = find_programs()
        check_paths(self.config)
        # bwrap dies with its parent *thread*: these live until `close`.
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="bubblewrap")
        # Sandboxes that start at the same time; more would only make each of them slow.
        self._slots = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        raise_file_limit()  # three per sandbox
        try:
            self._tree = await asyncio.to_thread(self._start_tree)
            self._files = {name: _memory_file(name, text.encode()) for name, text in ETC.items()}
            if Defence.SECCOMP in self.defences:
                self._files["seccomp"] = _memory_file("seccomp", bpf_program())
            await self._check_start()
        except BaseException as error:
            await self.close()
            if isinstance(error, SandboxFailure):
                raise MissingError(f"sandbox.backend=bubblewrap does not work here: {error}. {HINT}") from error
            raise

    async def _check_start(self) -> None:
        """Open a first sandbox; if it is killed, which says nothing about the machine, another one."""
        try:
            sandbox = await self.open("start")
        except SandboxKilledError as error:
            _log.warning("the first sandbox was killed, another is tried: %s", error)
            sandbox = await self.open("start")
        await sandbox.close()

    def _start_tree(self) -> CgroupTree | None:
        try:
            tree = find_tree(os.environ.get(CGROUP_VARIABLE))
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
            _log.warning("ended the sandboxes that the tool server %s left behind", name)
        return tree

    async def open(self, session_id: str) -> BubblewrapSandbox:
        """Start bubblewrap and wait for its runner."""
        async with self._slots:
            return await super().open(session_id)

    async def _await_ready(self, sandbox: BubblewrapSandbox) -> None:
        try:
            await sandbox.ready()
        except SandboxFailure as error:
            if sandbox.process.poll() in KILLED:
                raise SandboxKilledError(str(error)) from error
            raise
        await sandbox.start_egress(self.config.hosts, self._origin)

    async def _start_sandbox(self, session_id: str) -> BubblewrapSandbox:
        sandbox_id = f"bubblewrap-{uuid.uuid4().hex[:12]}"
        group = Cgroup()
        try:
            if self._tree is not None:
                group = self._tree.create(sandbox_id, self.config.limits, self.defences)
            return await self._spawn(sandbox_id, group)
        except OSError as error:
            group.remove()
            raise SandboxFailure(f"no sandbox could be made: {error}{_file_limit_hint(error)}") from error

    async def _spawn(self, sandbox_id: str, group: Cgroup) -> BubblewrapSandbox:
        with contextlib.ExitStack() as server_fds, contextlib.ExitStack() as sandbox_fds:
            runner_stdin, to_runner = _close_with(os.pipe2(os.O_CLOEXEC), sandbox_fds, server_fds)
            from_runner, runner_stdout = _close_with(os.pipe2(os.O_CLOEXEC), server_fds, sandbox_fds)
            (stderr,) = _close_with((os.memfd_create("stderr", os.MFD_CLOEXEC),), server_fds)
            inherited = {}
            for name, fd in self._files.items():
                # Opened again for each sandbox: duplicates would share one file offset.
                (inherited[name],) = _close_with(
                    (os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC),), sandbox_fds
                )
            channel = None
            if self.config.hosts and Defence.NETWORK in self.defences:
                channel, runner_channel = map(socket.socket.detach, socket.socketpair())
                _close_with((channel, runner_channel), server_fds, sandbox_fds)
                inherited["egress"] = runner_channel
            process = await asyncio.get_running_loop().run_in_executor(
                self._threads,
                lambda: subprocess.Popen(
                    self._command(group, inherited),
                    stdin=runner_stdin,
                    stdout=runner_stdout,
                    stderr=stderr,
                    pass_fds=tuple(inherited.values()),
                    cwd="/",
                    env=server_environment(self.defences),
                    start_new_session=True,
                ),
            )
            try:
                reader, writer = await open_pipes(from_runner, to_runner)
            except BaseException:
                await end_processes(process, group)
                raise
            server_fds.pop_all()
        sandbox = BubblewrapSandbox(sandbox_id, reader, writer, self.config.limits, self.defences)
        sandbox.process, sandbox.cgroup, sandbox.stderr = process, group, stderr
        sandbox.egress_channel = None if channel is None else socket.socket(fileno=channel)
        return sandbox

    def _command(self, group: Cgroup, inherited: dict[str, int]) -> list[str]:
        user = host_user(next(self._user_numbers)) if os.getuid() == 0 else None
        return command(self.config, self.defences, self._programs, joins=group.joins, user=user, inherited=inherited)

    async def close(self) -> None:
        """Close all sandboxes, those being opened included, and the server's cgroup."""
        await self._close_sandboxes()
        if self._tree is not None:
            await asyncio.to_thread(self._tree.close)
            self._tree = None
        await asyncio.to_thread(self._threads.shutdown)
        for fd in self._files.values():
            os.close(fd)
        self._files = {}


def _file_limit_hint(error: OSError) -> str:
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f" (this process may have {limit} open files, see ulimit -n, and needs three per sandbox)"


def _memory_file(name: str, content: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd


def _close_with(fds: tuple[int, ...], *owners: contextlib.ExitStack) -> tuple[int, ...]:
    for fd, owner in zip(fds, owners, strict=True):
        owner.callback(os.close, fd)
    return fds
