"""Contracts of sandboxes: `Job` and `Outcome`, `Sandbox`, and `SandboxBackend`, which creates sandboxes.

To add a backend, subclass `SandboxBackend` and `Sandbox` and register the backend in the entry-point group
``agentrl.sandboxes``, or name it as ``sandbox.backend=file.py:Class``. ``agentrl tools sandbox --backend NAME`` starts it,
attempts everything that a sandbox must prevent, and prints which defence stopped each attempt. Every tool server makes
the same attempts before it serves, and refuses to start if one succeeds. `agentrl.testing.check_sandbox` checks the rest of
the contract, for a backend's tests.

Example::

    class FirecrackerBackend(SandboxBackend):
        name = "firecracker"

        async def start(self) -> None: ...          # raise MissingError if this machine cannot run it
        async def open(self, session_id: str) -> Sandbox: ...   # apply self.config.limits
        async def close(self) -> None: ...

A backend that can start a Python process and talk to it over a stream needs only little code:
`agentrl.sandbox.runner_sandbox.RunnerSandbox` implements `Sandbox` over such a stream, limits included.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Self

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.types import ToolStatus

_log = logging.getLogger(__name__)

WORK = "/work"
"""Working directory of code in a sandbox; its files stay from call to call."""


def unsafe_warning(name: str) -> str:
    """Return the warning for a backend without isolation."""
    return f"sandbox.backend={name}: NOTHING is sandboxed; code of the policy can read, change and send whatever this user can"


class Defence(StrEnum):
    """Mechanisms that separate code from the machine. All are on; tests turn one off to show what it prevents."""

    SECCOMP = "seccomp"
    """Refuses system calls that no program of a policy needs: vsock, netlink, io_uring, ptrace, mounts, keyrings, bpf …"""
    MEMORY = "memory"
    """Limits the memory of all processes together (cgroup)."""
    PROCESSES = "processes"
    """Limits the number of processes and threads (cgroup)."""
    CPU = "cpu"
    """Limits CPU: cores by cgroup, seconds per process by rlimit."""
    WALL = "wall"
    """Ends a call that exceeds its wall time."""
    FILE_SIZE = "file_size"
    """Limits the size of one file (rlimit)."""
    OPEN_FILES = "open_files"
    """Limits open files per process (rlimit)."""
    DISK = "disk"
    """Limits the size of all files together (size of the tmpfs)."""
    INODES = "inodes"
    """Limits the number of files (inodes of the tmpfs)."""
    OUTPUT = "output"
    """Cuts the output of a call."""
    NETWORK = "network"
    """No network interface but a private loopback (network namespace)."""
    PROCESS_NAMESPACE = "process_namespace"
    """Other processes are invisible and cannot be signalled (PID and IPC namespaces)."""
    FILES = "files"
    """Only the programs of the machine are visible of its files, read-only (mount namespace)."""
    ENVIRONMENT = "environment"
    """None of the server's environment variables."""
    PRIVILEGES = "privileges"
    """An unprivileged user without capabilities, who can gain none."""
    KERNEL = "kernel"
    """Code runs on a second kernel, that of ``sandbox.runtime``; only with such a runtime."""
    RUNNER = "runner"
    """The runner's memory and files cannot be opened: it is not dumpable."""
    SWEEP = "sweep"
    """Kills processes that a call leaves behind."""


ALL_DEFENCES = frozenset(Defence)


@dataclass(frozen=True, slots=True)
class Job:
    """One execution in a sandbox: Python ``code``, or the program ``argv``."""

    call_id: str
    """Unique in the sandbox."""
    code: str | None = None
    """Python, run as ``__main__`` in a separate process."""
    argv: tuple[str, ...] = ()
    """A program and its arguments, if there is no code."""
    stdin: bytes = b""
    """Content of standard input."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to the sandbox's few."""
    cwd: str = ""
    """Working directory, absolute or relative to `WORK`."""
    wall_s: float | None = None
    """Limit of wall time, seconds; None takes the sandbox's limit."""
    cpu_s: int | None = None
    """Limit of CPU time per process, seconds; None takes the sandbox's limit."""
    output_bytes: int | None = None
    """Limit of standard output and error together, bytes; None takes the sandbox's limit."""
    stateful: bool = False
    """Run ``code`` in the sandbox's one long-lived process, which keeps variables from call to call."""

    def __post_init__(self) -> None:
        """Raise ValueError for a job with both or neither of code and program, or a stateful one with stdin."""
        if (self.code is None) == (not self.argv):
            raise ValueError("a job is either code or argv")
        if self.stateful and (self.argv or self.stdin):
            raise ValueError("a stateful job is code without stdin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a job."""

    status: ToolStatus
    """``OK``, ``ERROR`` (exit status not 0), ``TIMEOUT``, ``OUT_OF_MEMORY``, ``OUTPUT_CUT`` or ``KILLED``. Failures of the
    sandbox itself are raised as `agentrl.core.errors.SandboxFailure` and never are an outcome."""
    stdout: str
    """Standard output up to the limit; bytes that are not UTF-8 are replaced."""
    stderr: str
    """Standard error, a traceback included."""
    exit_code: int | None
    """Exit status; negative: the signal that ended it; None: ended by a limit."""
    seconds: float
    """Wall time in the sandbox."""
    detail: str = ""
    """Why it was ended, in words for the policy; empty if it ended by itself."""


class _Closable(ABC):
    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        """Return it, to be closed at the end of the context."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close it."""
        await self.close()


class Sandbox(_Closable):
    """An open sandbox. Concurrent calls run one after the other; files under `WORK` stay from call to call."""

    id: str
    """Unique on this machine."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can take another call."""

    @abstractmethod
    async def run(self, job: Job) -> Outcome:
        """Run a job within its limits.

        What the code does, a limit it exceeds included, is an `Outcome`. Processes that the job leaves behind are killed
        before this returns. If a call is cancelled, the sandbox may end: `alive` is False then.

        Raises:
            SandboxFailure: the sandbox itself failed, or is no longer `alive`.
        """

    @abstractmethod
    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, absolute or relative to `WORK`; missing parent folders are created.

        Raises:
            OSError: the file cannot be written in the sandbox; with errno.
            SandboxFailure: see `run`.
        """

    @abstractmethod
    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Return a file's content.

        Raises:
            OSError: it cannot be read, or is larger than ``max_bytes`` (``errno.EFBIG``).
            SandboxFailure: see `run`.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all its processes and remove what it left on the machine. A second call does nothing."""


class SandboxBackend(_Closable):
    """Creates sandboxes of one kind. A tool server has one backend, and opens a sandbox per session.

    The constructor is called with the configuration alone and must not start anything. `start`, `open` and `close` run in
    one event loop and must not block it; `open` is called concurrently.

    Args:
        config: the ``sandbox`` section; ``config.limits`` are those of every sandbox.
        defences: those that are on. A subset of all is for tests that show what a defence prevents; a backend may
            ignore it.
    """

    name: ClassVar[str]
    """Name in messages; by convention the registered one."""
    isolated: ClassVar[bool] = True
    """Whether code is separated from the machine. If False, the server logs a warning in red at its start and makes no attempts
    against the backend: they would succeed, and harm this machine."""

    has_images: ClassVar[bool] = False
    """Whether ``sandbox.image`` is what sandboxes are made from. Then a server makes a further backend for each image that a
    task names, by the constructor."""

    def __init__(self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES) -> None:
        self.config = config
        self.defences = defences

    @property
    def machine_kernel(self) -> str:
        """Release of the kernel of the machine that sandboxes are on."""
        return os.uname().release

    def forward(self, host: str) -> str:
        """Let code reach one server of this machine as any client does, without a proxy. Called before `start`.

        Args:
            host: ``name:port`` of the server; it is also in ``config.hosts``.

        Returns:
            ``name:port`` under which code reaches it. The default is ``host`` itself, which code reaches by the proxy, if there
            is one.
        """
        return host

    @classmethod
    def check(cls, config: SandboxConfig) -> None:
        """Check what is cheap to know before a run: programs, packages, sockets. Starts nothing; the default does nothing.

        Raises:
            MissingError: this machine lacks something; the message states what to install or to set.
            ConfigError: a value of the ``sandbox`` section does not fit this backend.
        """

    @abstractmethod
    async def start(self) -> None:
        """Remove what servers that died have left, and prepare to open sandboxes. Called once.

        Raises:
            MissingError: this machine lacks something; the message states what to install or to allow.
        """

    @abstractmethod
    async def open(self, session_id: str) -> Sandbox:
        """Return a new sandbox that is ready for its first call. A cancelled call leaves nothing behind.

        Raises:
            SandboxFailure: it could not be made.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close all sandboxes that are open or being opened, and what `start` made."""

    async def __aenter__(self) -> Self:
        """Start the backend; log a warning in red if it does not isolate."""
        if not self.isolated:
            _log.critical("\033[31m%s\033[0m", unsafe_warning(self.name))
        await self.start()
        return self
