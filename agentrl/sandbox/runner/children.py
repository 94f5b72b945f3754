"""The runner's side of the processes of calls: their output, their end, and the worker that keeps variables.

A module of the runner, see `snippet.py`.
"""

from __future__ import annotations

import os
import select
import signal
import time

from agentrl.sandbox.runner.snippet import LENGTH, TYPE_CHECKING, splice, worker_main

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandbox.runner.snippet import Settings

CHUNK = 65536


class Capture:
    """Output of a call, up to a limit. It goes from pipes into files in memory, which no later call's process has."""

    def __init__(self) -> None:
        self.out_read, self.out_write = os.pipe2(os.O_CLOEXEC)
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC)
        self.open = [self.out_read, self.err_read]
        self.pipes = (self.out_read, self.err_read)
        self.files: dict[int, int] = {}  # by pipe, made when there is data
        for fd in self.open:
            os.set_blocking(fd, False)
        self.begin(None)

    def begin(self, limit: int | None) -> None:
        """Begin a new call: drop what was read, and set the limit in bytes (None: no limit)."""
        self.limit = limit
        self.cut = -1  # the pipe whose last byte showed that there is more than the limit
        self.sizes = dict.fromkeys(self.pipes, 0)
        for file in self.files.values():
            os.close(file)
        self.files.clear()

    def close_writers(self) -> None:
        """Close the write ends, which the child has."""
        os.close(self.out_write)
        os.close(self.err_write)

    def close(self) -> None:
        """Close the read ends and the files."""
        for fd in (*self.pipes, *self.files.values()):
            os.close(fd)

    @property
    def over(self) -> bool:
        """Whether the output exceeded the limit."""
        return self.limit is not None and sum(self.sizes.values()) > self.limit

    def take(self, fd: int) -> bool:
        """Move data once. Returns whether there was any."""
        max_bytes = CHUNK if self.limit is None else min(CHUNK, self.limit + 1 - sum(self.sizes.values()))
        if fd not in self.files:
            self.files[fd] = os.memfd_create("output")
        try:
            moved = splice(fd, self.files[fd], max_bytes)
        except BlockingIOError:
            return False
        if not moved:
            self.open.remove(fd)
            return False
        self.sizes[fd] += moved
        if self.over:
            self.cut = fd
        return True

    def drain(self) -> None:
        """Move all available data without waiting."""
        for fd in list(self.open):
            while not self.over and self.take(fd):
                pass

    def output(self) -> list[tuple[int, int]]:
        """Return the files of output and errors, and how many bytes of each the limit lets through."""
        return [(self.files.get(fd, -1), self.sizes[fd] - (self.over and fd == self.cut)) for fd in self.pipes]


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

    def send(self, file: int, wall_s: float | None) -> bool:
        """Send the job in a file. Returns False if it is not read in time: the policy's code runs there, and may not read."""
        unsent = os.lseek(file, 0, os.SEEK_END)
        os.lseek(file, 0, os.SEEK_SET)
        length = memoryview(LENGTH.pack(unsent))
        deadline = None if wall_s is None else time.monotonic() + wall_s
        poll = select.poll()
        poll.register(self.requests, select.POLLOUT)
        while unsent:
            wait = None if deadline is None else deadline - time.monotonic()
            if (wait is not None and wait <= 0) or not poll.poll(None if wait is None else wait * 1000):
                return False
            if length:
                length = length[os.write(self.requests, length) :]
            else:
                unsent -= splice(file, self.requests, unsent)
        return True

    def close(self) -> None:
        """Close all file descriptors."""
        self.child.close()
        self.capture.close()
        os.close(self.requests)
        os.close(self.replies)
