"""The runner's side of the processes of calls: their output, their end, and the worker that keeps variables.

A module of the runner, see `snippet.py`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time

from agentrl.sandbox.runner.snippet import LENGTH, TYPE_CHECKING, worker_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandbox.runner.snippet import Request, Settings

CHUNK = 65536


class Capture:
    """Output of a call, up to a limit."""

    def __init__(self) -> None:
        self.out_read, self.out_write = os.pipe2(os.O_CLOEXEC)
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC)
        self.open = [self.out_read, self.err_read]
        for fd in self.open:
            os.set_blocking(fd, False)
        self.begin(None)

    def begin(self, limit: int | None) -> None:
        """Begin a new call: drop what was read, and set the limit in bytes (None: no limit)."""
        self.limit = limit
        self.total = 0
        self.data = {self.out_read: bytearray(), self.err_read: bytearray()}

    def close_writers(self) -> None:
        """Close the write ends, which the child has."""
        os.close(self.out_write)
        os.close(self.err_write)

    def close(self) -> None:
        """Close the read ends."""
        os.close(self.out_read)
        os.close(self.err_read)

    @property
    def over(self) -> bool:
        """Whether the output exceeded the limit."""
        return self.limit is not None and self.total > self.limit

    def take(self, fd: int) -> bool:
        """Read once. Returns whether there was data."""
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.open.remove(fd)
            return False
        room = len(chunk) if self.limit is None else max(0, self.limit - self.total)
        self.data[fd] += chunk[:room]
        self.total += len(chunk)
        return True

    def drain(self) -> None:
        """Read all available data without waiting."""
        for fd in list(self.open):
            while not self.over and self.take(fd):
                pass

    def texts(self) -> dict[str, str]:
        """Return the kept output as text."""
        out, err = self.data[self.out_read], self.data[self.err_read]
        return {"stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}


class Child:
    """A process that runs code of the policy, from its fork until it is reaped."""

    def __init__(self, main: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                main()
            finally:
                os._exit(1)
        self.code: int | None = None
        """Exit status once it is reaped; negative: the signal that ended it."""
        self.cpu_s = 0.0
        try:
            self.exited = os.pidfd_open(self.pid)
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise

    def close(self) -> None:
        """Close the process file descriptor."""
        os.close(self.exited)


class Worker:
    """The process of stateful calls, which keeps variables. It is stopped (SIGSTOP) between calls."""

    def __init__(self, settings: Settings, null: int) -> None:
        self.capture = capture = Capture()
        worker_requests, self.requests = os.pipe2(os.O_CLOEXEC)
        self.replies, worker_replies = os.pipe2(os.O_CLOEXEC)
        for fd in (self.requests, self.replies):  # code in that process may stop reading or writing at any point
            os.set_blocking(fd, False)
        fds = (null, capture.out_write, capture.err_write)
        try:
            self.child = Child(lambda: worker_main(settings, fds, worker_requests, worker_replies))
        except BaseException:
            for fd in (self.requests, self.replies):
                os.close(fd)
            capture.close()
            raise
        finally:
            capture.close_writers()
            os.close(worker_requests)
            os.close(worker_replies)

    def send(self, message: Request, wall_s: float | None) -> bool:
        """Send a request. Returns False if it is not read in time: the policy's code runs there, and may not read."""
        data = json.dumps(message).encode()
        view = memoryview(LENGTH.pack(len(data)) + data)
        deadline = None if wall_s is None else time.monotonic() + wall_s
        poll = select.poll()
        poll.register(self.requests, select.POLLOUT)
        while view:
            left = None if deadline is None else deadline - time.monotonic()
            if (left is not None and left <= 0) or not poll.poll(None if left is None else left * 1000):
                return False
            view = view[os.write(self.requests, view) :]
        return True

    def close(self) -> None:
        """Close all file descriptors."""
        self.child.close()
        self.capture.close()
        os.close(self.requests)
        os.close(self.replies)
