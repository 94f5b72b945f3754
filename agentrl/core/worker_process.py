"""Child processes that answer requests line by line, and can be killed in the middle of one."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

START_S = 120.0
"""Seconds a worker may take to import its libraries."""


class WorkerProcess:
    """A process that runs a module of Python; used by one thread at a time.

    It prints ``ready`` when it can take requests. It ends when its standard input does, so with the process that started it.

    Args:
        module: that it runs.
        ready: the line that it prints first.
        name: what messages call it.
        env: its environment variables; None: those of this process.

    Raises:
        RuntimeError: it does not start; the message has the line that it printed in place of ``ready``.
    """

    def __init__(self, module: str, ready: str, name: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # Ctrl-C is for the run, not for its workers
        )
        self._buffer = b""
        try:
            line = self.read_line(time.monotonic() + START_S)
        except EOFError:
            line = None
        if line != ready:
            self.kill()
            raise RuntimeError(f"the {name} does not start: {line or 'no output'}")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ending_signal(self) -> int:
        """Wait for the end of the process, and return the number of the signal that ended it; 0: it ended itself."""
        return max(0, -self._process.wait())

    def send_line(self, line: str) -> None:
        """Write a line to the worker; the end of a worker that is dead is seen by `read_line`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def read_line(self, deadline: float) -> str | None:
        """Return the worker's next line, or None if it printed none before the deadline, on `time.monotonic`'s clock.

        Raises:
            EOFError: the worker ended.
        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not select.select([descriptor], [], [], seconds_left)[0]:
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


W = TypeVar("W", bound=WorkerProcess)


class ProcessPool(Generic[W]):
    """Worker processes that several threads share, each started when it is first needed.

    Args:
        start: starts a worker.
        size: maximal number of processes; further callers wait.
    """

    def __init__(self, start: Callable[[], W], size: int) -> None:
        self._start = start
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[W] = []
        atexit.register(self.close)

    @contextmanager
    def worker(self) -> Iterator[W]:
        """Lend a worker. It is forgotten if it does not run at the end, and killed if an exception ends the body."""
        with self._slots:
            worker = self._take()
            try:
                yield worker
            except BaseException:
                worker.kill()
                raise
            if worker.alive:
                self._idle.append(worker)

    def _take(self) -> W:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        return self._start()

    def close(self) -> None:
        """End all idle workers. The pool can be used again."""
        while self._idle:
            self._idle.pop().kill()
