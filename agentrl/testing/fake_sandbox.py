"""A fake sandbox in this process, without any program: for tests of tools and of servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from typing_extensions import override

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Job, Outcome, Sandbox, SandboxBackend


def echo_code(job: Job) -> Outcome:
    """Return an outcome that prints the job's code."""
    return Outcome(ToolStatus.OK, job.code or "", "", 0, 0.0)


class FakeSandbox(Sandbox):
    """Answers jobs with a function, and keeps files in memory."""

    def __init__(self, name: str = "fake", answer: Callable[[Job], Outcome] = echo_code) -> None:
        """Create an open sandbox that answers each job with ``answer``."""
        self.id = name
        self.gate = asyncio.Event()
        """Jobs wait for it; it is set at the start."""
        self.gate.set()
        self.jobs: list[Job] = []
        self.files: dict[str, bytes] = {}
        self.closed = False
        self.broken = False
        """Set it to end the sandbox as a failure would."""
        self._answer = answer
        self.running = False
        """Whether a job waits for the gate."""

    @property
    @override
    def alive(self) -> bool:
        return not self.broken and not self.closed

    @override
    async def run(self, job: Job) -> Outcome:
        if not self.alive:
            raise SandboxFailure(f"sandbox {self.id} is gone")
        assert not self.running, "two calls at once in one sandbox"
        self.jobs.append(job)
        self.running = True
        try:
            await self.gate.wait()
        finally:
            self.running = False
        return self._answer(job)

    @override
    async def write_file(self, path: str, content: bytes) -> None:
        self.files[path] = content

    @override
    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file", path)
        return self.files[path]

    @override
    async def close(self) -> None:
        self.closed = True


class FakeSandboxBackend(SandboxBackend):
    """Opens `FakeSandbox`es, or fails with ``fault``."""

    name = "fake"

    def __init__(self, config: SandboxConfig | None = None) -> None:
        """Create a backend that has opened nothing."""
        super().__init__(config or SandboxConfig())
        self.opened: list[FakeSandbox] = []
        self.fault: Exception | None = None

    @override
    async def start(self) -> None: ...

    @override
    async def open(self, session_id: str) -> FakeSandbox:
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        self.opened.append(FakeSandbox(session_id))
        return self.opened[-1]

    @override
    async def close(self) -> None: ...

    @property
    def alive(self) -> list[FakeSandbox]:
        """Sandboxes that can take another call."""
        return [sandbox for sandbox in self.opened if sandbox.alive]
