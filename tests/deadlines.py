"""Waiting in tests for other tasks, threads and processes: by condition, with a deadline, never for a guessed time."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.005
TIMEOUT_S = 40.0
"""For what is sure to come; a test that says how soon gives its own bound."""


def wait_until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition of another thread or process is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{condition} is not true after {timeout_s:g} s"
        time.sleep(POLL_S)


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = TIMEOUT_S) -> None:
    """Let the event loop run until a condition, or what the coroutine that it returns gives, is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            answer = condition()
            if await answer if isinstance(answer, Awaitable) else answer:
                return
            await asyncio.sleep(POLL_S)


async def run_ready_tasks() -> None:
    """Let every task run until it waits for time or for something that no ready task does."""
    for _ in range(100):
        await asyncio.sleep(0)


def wait_for_exit(pid: int, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a process, of this one or of another, has ended; it need not be reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], timeout_s)[0], f"process {pid} still runs after {timeout_s:g} s"
    finally:
        os.close(descriptor)
