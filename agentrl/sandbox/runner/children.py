"""The processes of calls as the runner sees them: what they print, how they end, and the one that keeps variables.

Part of the runner, see `snippet.py`.
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
    """What a call prints, up to a limit."""

    def __init__(self) -> None:
        self.out_read, self.out_write = os.pipe2(os.O_CLOEXEC)
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC)
        self.open = [self.out_read, self.err_read]
        for fd in self.open:
            os.set_blocking(fd, False)
        self.begin(None)

    def begin(self, limit: int | None) -> None:
        """Forget what there was."""
        self.limit = limit
        self.total = 0
        self.data = {self.out_read: bytearray(), self.err_read: bytearray()}

    def close_writers(self) -> None:
        """Leave them to the child."""
        os.close(self.out_write)
        os.close(self.err_write)

    def close(self) -> None:
        """Close the ends that are read."""
        os.close(self.out_read)
        os.close(self.err_read)

    @property
    def over(self) -> bool:
        """Whether there was more than the limit."""
        return self.limit is not None and self.total > self.limit

    def take(self, fd: int) -> bool:
        """Read once. Returns whether there was something."""
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not part:
            self.open.remove(fd)
            return False
        room = len(part) if self.limit is None else max(0, self.limit - self.total)
        self.data[fd] += part[:room]
        self.total += len(part)
        return True

    def drain(self) -> None:
        """Read what is there without waiting."""
        for fd in list(self.open):
            while not self.over and self.take(fd):
                pass

    def texts(self) -> dict[str, str]:
        """Return what was kept."""
        out, err = self.data[self.out_read], self.data[self.err_read]
        return {"stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}


class Child:
    """A process of the policy's, from its fork to its burial."""

    def __init__(self, main: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                main()
            finally:
                os._exit(1)
        self.code: int | None = None
        """Its exit status, once it is buried; negative is a signal."""
        self.cpu_s = 0.0
        try:
            self.exited = os.pidfd_open(self.pid)
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise

    def close(self) -> None:
        """Close what watched it."""
        os.close(self.exited)


class Worker:
    """The one process that keeps variables from call to call. It is stopped between calls."""

    def __init__(self, settings: Settings, null: int) -> None:
        self.capture = capture = Capture()
        their_requests, self.requests = os.pipe2(os.O_CLOEXEC)
        self.replies, their_replies = os.pipe2(os.O_CLOEXEC)
        for fd in (self.requests, self.replies):  # code in that process may leave both as it likes
            os.set_blocking(fd, False)
        fds = (null, capture.out_write, capture.err_write)
        try:
            self.child = Child(lambda: worker_main(settings, fds, their_requests, their_replies))
        except BaseException:
            for fd in (self.requests, self.replies):
                os.close(fd)
            capture.close()
            raise
        finally:
            capture.close_writers()
            os.close(their_requests)
            os.close(their_replies)

    def send(self, message: Request, wall_s: float | None) -> bool:
        """Send a request; return False where nobody reads it in time: what runs there is the policy's."""
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
        """Close everything."""
        self.child.close()
        self.capture.close()
        os.close(self.requests)
        os.close(self.replies)
