"""One bubblewrap backend for the tests of a module, and the loop that it lives in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import MissingError
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Outcome, Sandbox
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

T = TypeVar("T")
LIMITS = SandboxLimits(wall_s=20, memory_mb=96, disk_mb=16, file_mb=8, output_kb=64, inodes=512, processes=24)


class Bubblewrap:
    """Runs coroutines in the loop of one backend."""

    def __init__(self) -> None:
        self.loop = asyncio.Runner()
        self.backend = BubblewrapBackend(SandboxConfig(limits=LIMITS))
        self.loop.run(self.backend.start())

    def close(self) -> None:
        self.loop.run(self.backend.close())
        self.loop.close()

    def __call__(self, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Use a new sandbox."""

        async def main() -> T:
            async with await self.backend.open("test") as sandbox:
                return await use(sandbox)

        return self.loop.run(main())

    def descriptors(self) -> int:
        """Return the open descriptors of this process once they stay: the loop's next rounds close those of ended sandboxes."""

        async def settled() -> int:
            counts: list[int] = []
            while len(counts) < 30 or len(set(counts[-30:])) > 1:
                await asyncio.sleep(0.01)
                counts.append(len(os.listdir("/proc/self/fd")))
            return counts[-1]

        return self.loop.run(settled())

    def code(self, *snippets: str, **options: Any) -> Outcome:
        """Run snippets in a new sandbox; return how the last one ended."""

        async def use(sandbox: Sandbox) -> Outcome:
            outcomes = [await sandbox.run(Job(str(i), code=code, **options)) for i, code in enumerate(snippets)]
            return outcomes[-1]

        return self(use)


@asynccontextmanager
async def other_backend(
    defences: frozenset[Defence] = ALL_DEFENCES, **section: Any
) -> AsyncIterator[BubblewrapBackend]:
    """A backend for one test."""
    backend = BubblewrapBackend(SandboxConfig(**{"limits": LIMITS, **section}), defences)
    try:
        await backend.start()
    except MissingError as error:
        pytest.skip(f"bubblewrap: {error}")
    try:
        yield backend
    finally:
        await backend.close()
