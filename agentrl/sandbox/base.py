"""What a sandbox is, whichever backend makes it."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import ClassVar, Self

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.types import ToolStatus

WORK = "/work"
"""The folder in a sandbox where code starts and files stay."""

UNSAFE_WARNING = (
    "sandbox.backend=unsafe_subprocess: NOTHING is sandboxed; code of the policy can read, change and send whatever "
    "this user can"
)


class Defence(StrEnum):
    """What stands between code and the machine. All of them stand; a test takes one away to show what it is for."""

    SECCOMP = "seccomp"
    """Refuses system calls that no program of a policy needs: vsock, netlink, io_uring, ptrace, mounts, keyrings, bpf …"""
    MEMORY = "memory"
    """Bounds the memory of all processes together (cgroup)."""
    PROCESSES = "processes"
    """Bounds processes and threads (cgroup)."""
    CPU = "cpu"
    """Bounds CPU: cores by cgroup, seconds a process by rlimit."""
    WALL = "wall"
    """Ends a call that takes too long."""
    FILE_SIZE = "file_size"
    """Bounds one file (rlimit)."""
    OPEN_FILES = "open_files"
    """Bounds open files a process (rlimit)."""
    DISK = "disk"
    """Bounds all files together (size of the tmpfs)."""
    INODES = "inodes"
    """Bounds the number of files (inodes of the tmpfs)."""
    OUTPUT = "output"
    """Cuts what a call prints."""
    NETWORK = "network"
    """No interface but a loopback of its own (network namespace)."""
    PROCESS_NAMESPACE = "process_namespace"
    """No sight of, and no signal to, other processes (PID and IPC namespaces)."""
    FILES = "files"
    """Nothing of the machine's files but its programs, read-only (mount namespace)."""
    ENVIRONMENT = "environment"
    """None of the server's environment variables."""
    PRIVILEGES = "privileges"
    """An unprivileged user without capabilities, who can gain none."""
    RUNNER = "runner"
    """The runner's memory and files cannot be opened: it is not dumpable."""
    SWEEP = "sweep"
    """Processes that a call leaves behind are killed."""


ALL_DEFENCES = frozenset(Defence)


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to run in a sandbox: Python ``code``, or the program ``argv``."""

    call_id: str
    """Unique in the sandbox."""
    code: str | None = None
    """Python, run as ``__main__`` in a process of its own."""
    argv: tuple[str, ...] = ()
    """A program and its arguments, where there is no code."""
    stdin: bytes = b""
    """What it can read."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the sandbox's own few."""
    cwd: str = ""
    """Where it starts, relative to `WORK` or absolute."""
    wall_s: float | None = None
    """Seconds; None takes the sandbox's limit."""
    cpu_s: int | None = None
    """Seconds of CPU a process; None takes the sandbox's limit."""
    output_bytes: int | None = None
    """Bytes of standard output and error together; None takes the sandbox's limit."""
    stateful: bool = False
    """Run ``code`` in the one process of the sandbox that keeps variables from call to call."""

    def __post_init__(self) -> None:
        """Refuse a job that is neither code nor a program, or has what no stateful one can have."""
        if (self.code is None) == (not self.argv):
            raise ValueError("a job is either code or argv")
        if self.stateful and (self.argv or self.stdin):
            raise ValueError("a stateful job is code without stdin")

    @property
    def described(self) -> str:
        """The job in a few words, for messages."""
        return shlex.join(self.argv)[:80] if self.argv else "Python code"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    status: ToolStatus
    """``OK``, ``ERROR`` (exit status not 0), ``TIMEOUT``, ``OUT_OF_MEMORY``, ``OUTPUT_CUT`` or ``KILLED``. Failures of the
    sandbox itself are raised as `agentrl.core.errors.SandboxFailure` and never are an outcome."""
    stdout: str
    """Standard output, as far as it was kept; bytes that are no UTF-8 are replaced."""
    stderr: str
    """Standard error, a traceback included."""
    exit_code: int | None
    """Exit status; negative is the signal that ended it; None where it was ended for a limit."""
    seconds: float
    """Wall time in the sandbox."""
    detail: str = ""
    """What ended it, in words for the policy; empty where it ended by itself."""


class Sandbox(ABC):
    """One sandbox. Calls wait for each other; files under `WORK` stay from call to call."""

    id: str
    """Unique on this machine."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can take another call."""

    @abstractmethod
    async def run(self, job: Job) -> Outcome:
        """Run a job.

        Raises:
            SandboxFailure: the sandbox failed for reasons of its own, or is no longer `alive`.

        """

    @abstractmethod
    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file, relative to `WORK` or absolute; folders on the way are made.

        Raises:
            OSError: the sandbox's own word why it cannot be written.
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

    async def __aenter__(self) -> Self:
        """Return the sandbox."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()


class SandboxBackend(ABC):
    """Makes sandboxes of one kind.

    Args:
        config: the sandbox section.
        defences: those that stand. Anything but all of them is for tests that show what a defence is for.
    """

    name: ClassVar[str]

    def __init__(self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES) -> None:
        self.config = config
        self.defences = defences

    @abstractmethod
    async def start(self) -> None:
        """Remove what servers that died have left, and get ready.

        Raises:
            MissingError: this machine lacks something; the message says what to install or to allow.

        """

    @abstractmethod
    async def open(self, session_id: str) -> Sandbox:
        """Return a new sandbox that is ready for its first call.

        Raises:
            SandboxFailure: it could not be made.

        """

    @abstractmethod
    async def close(self) -> None:
        """Close all sandboxes that are open, and what `start` made."""

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()
