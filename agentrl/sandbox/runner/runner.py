"""The runner: process 1 of a sandbox. It forks a process for every call, limits it, and cleans up after it.

The program starts with `snippet.py` and `children.py`. Its one argument is JSON, see `python_command` in
`runner_command.py`. Requests come on standard input, replies go to what standard output was at the start;
`runner_sandbox.py` has the other end and describes the frames.

As process 1 of its PID namespace it receives no signal from inside, not even SIGKILL or SIGSTOP. It is not dumpable, so
that its memory and files cannot be opened through /proc. It opens no path that the policy could have prepared. So it can
only be ended from outside, or by the kernel's out-of-memory killer.

The processes of calls are forks of it. So its memory never holds the job, input or output of a call: the kernel moves them
between streams and files in memory, and only the process of the call reads them.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import sys
import time

from agentrl.sandbox.runner.children import Capture, Child, Worker
from agentrl.sandbox.runner.snippet import (
    LENGTH,
    PR_SET_DUMPABLE,
    TYPE_CHECKING,
    child_main,
    file_main,
    offer_egress,
    prctl,
    receive,
    splice,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentrl.sandbox.runner.snippet import Request, Settings

REAP_S = 0.1
"""How often a running call's orphaned zombies are reaped: they count as processes."""
FILE_S = 10.0
"""Limit of reading or writing a file."""


class Runner:
    """Serves requests, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replies, self.requests = os.dup(1), os.dup(0)
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(self.null, fd)
        self.worker: Worker | None = None
        self.children: dict[int, Child] = {}
        """By process id, those that are not reaped."""
        self.is_init = os.getpid() == 1
        """Whether it is process 1 of a PID namespace, so that every visible process is its descendant."""
        self.unread = 0
        """Bytes of the current request that are still in the stream."""

    def serve(self) -> None:
        """Serve requests until the stream ends. A call that could not be started is answered with the error."""
        while True:
            request = receive(self.requests)
            self.unread = sum(request["sizes"])
            files: list[int] = []
            try:
                files += (self.take(size) for size in request["sizes"])
                self.run(request, files)
            except MemoryError:
                self.send(request, {"errno": errno.ENOMEM, "error": "out of memory"})
            except OSError as error:
                self.send(request, {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)})
            for file in files:
                os.close(file)

    def take(self, size: int) -> int:
        """Return a file in memory with the next bytes of the stream of requests."""
        file = os.memfd_create("request")
        try:
            while size:
                moved = splice(self.requests, file, size)
                if not moved:
                    os._exit(0)
                size -= moved
                self.unread -= moved
        except BaseException:
            os.close(file)
            raise
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def send(self, request: Request, reply: Request, output: Sequence[tuple[int, int]] = ()) -> None:
        """Write a frame, then the beginnings of files; see `runner_sandbox.py`."""
        while self.unread:
            self.unread -= splice(self.requests, self.null, self.unread)
        data = json.dumps({**reply, "id": request["id"], "sizes": [size for _, size in output]}).encode()
        write_all(self.replies, LENGTH.pack(len(data)) + data)
        for file, size in output:
            offset = 0
            while offset < size:
                offset += os.sendfile(self.replies, file, offset, size - offset)

    def run(self, request: Request, files: list[int]) -> None:
        """Run a request and send the reply: stateful code in the worker, everything else in a new process.

        Its files: the job and, if there is one, standard input.
        """
        began = time.monotonic()
        if request["op"] == "ping":
            self.send(request, {"python": sys.version.split()[0], "pid": os.getpid()})
        elif request["op"] == "file":
            self.run_file(request, files)
        elif request["stateful"]:
            self.run_stateful(request, files[0])
        else:
            limits = (request["output_bytes"], request["wall_s"])
            with self.run_child(files, child_main, *limits) as (capture, exceeded, child):
                self.send_end(request, began, capture, exceeded, child, child.code, False)

    def send_end(
        self,
        request: Request,
        began: float,
        capture: Capture,
        exceeded: str | None,
        child: Child,
        code: int | None,
        variables_lost: bool,
    ) -> None:
        """Send the result of a call: limit exceeded, exit status, times and output."""
        if exceeded is None and capture.over:
            exceeded = "output"
        reply = {
            "exceeded": exceeded,
            "exit_code": None if exceeded else code,
            "cpu_s": child.cpu_s,
            "seconds": time.monotonic() - began,
            "variables_lost": variables_lost,
        }
        self.send(request, reply, capture.output())

    def run_file(self, request: Request, files: list[int]) -> None:
        """Read or write a file in a new process."""
        with self.run_child(files, file_main, None, FILE_S) as (capture, exceeded, child):
            if exceeded is None and not child.code:
                self.send(request, {}, capture.output())
                return
        number = (
            errno.ETIMEDOUT if exceeded is not None else errno.ENOMEM if child.code == -9 else child.code or errno.EIO
        )
        self.send(request, {"errno": number, "error": os.strerror(number)})

    @contextlib.contextmanager
    def run_child(
        self,
        files: list[int],
        main: Callable[[Settings, int, tuple[int, int, int]], None],
        output_bytes: int | None,
        wall_s: float | None,
    ) -> Iterator[tuple[Capture, str | None, Child]]:
        """Fork, watch, and clean up; give the output, the limit that ended the process or None, and the ended process."""
        capture = Capture()
        capture.begin(output_bytes)
        job, stdin = [*files, self.null][:2]
        try:
            try:
                fds = (stdin, capture.out_write, capture.err_write)
                child = Child(lambda: main(self.settings, job, fds))
            finally:
                capture.close_writers()
            self.children[child.pid] = child
            try:
                exceeded = self.watch(capture, child, None, wall_s)
                self.end(child, kill=exceeded is not None)
            finally:
                child.close()
            capture.drain()
            yield capture, exceeded, child
        finally:
            capture.close()

    def watch(self, capture: Capture, child: Child, replies: int | None, wall_s: float | None) -> str | None:
        """Read until the process has exited or replied. Returns the limit that the call exceeded ("wall", "output"), or None."""
        deadline = None if wall_s is None else time.monotonic() + wall_s
        done = [child.exited] if replies is None else [child.exited, replies]
        while True:
            wait = REAP_S
            if deadline is not None:
                wait = min(wait, deadline - time.monotonic())
                if wait <= 0:
                    return "wall"
            poll = select.poll()
            for fd in (*capture.open, *done):
                poll.register(fd, select.POLLIN)
            ready = dict(poll.poll(wait * 1000))
            for fd in ready:
                if fd in capture.pipes and ready[fd] & select.POLLIN:
                    capture.take(fd)
                elif fd in capture.pipes:  # every writer has closed it
                    capture.open.remove(fd)
            if capture.over:
                return "output"
            if any(fd in ready for fd in done):
                return None
            if not ready:
                self.reap()

    # ---- the end of a call

    def end(self, child: Child, kill: bool) -> None:
        """End all processes of this call, and reap them."""
        if kill or not self.is_init:  # before it is reaped, its id cannot belong to another process
            self.kill_group(child.pid)
        if self.is_init and self.settings["sweep"]:
            self.sweep(keep=self.worker.child.pid if self.worker else None)
        while child.code is None:
            self.reap(child.pid, 0)

    def sweep(self, keep: int | None) -> None:
        """Kill every process but this one and ``keep``. Only as process 1 of a PID namespace."""
        # No process forks while the signal is sent, and stopped ones do not fork after it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL if keep is None else signal.SIGSTOP)
        if keep is None:
            while self.reap(-1, 0):  # every orphan becomes a child of process 1
                pass
            return
        while True:
            pids = [pid for pid in live_processes() if pid not in (1, keep)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            if not pids:
                return
            time.sleep(0.0005)

    def reap(self, pid: int = -1, flags: int = os.WNOHANG) -> bool:
        """Reap all zombies; with ``flags=0`` wait for the next one. Returns whether there may be more."""
        while True:
            try:
                dead, status, usage = os.wait4(pid, flags)
            except ChildProcessError:
                return False
            if dead in self.children:
                child = self.children.pop(dead)
                child.code = os.waitstatus_to_exitcode(status)
                child.cpu_s = usage.ru_utime + usage.ru_stime
            if dead == 0 or flags == 0:
                return True

    def kill_group(self, pid: int) -> None:
        """Kill a process and its process group, if they still exist."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    # ---- stateful calls

    def run_stateful(self, request: Request, job: int) -> None:
        """Run a snippet in the worker process, which is started if there is none."""
        began = time.monotonic()
        variables_lost = self.worker is not None and self.worker.child.code is not None
        if self.worker is None or variables_lost:
            self.start_worker()
        worker = self.worker
        assert worker is not None
        capture, child = worker.capture, worker.child
        capture.begin(request["output_bytes"])
        os.kill(child.pid, signal.SIGCONT)
        exceeded, code = None, None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it closed its ends, or ended
            if not worker.send(job, request["wall_s"]):
                exceeded = "wall"
            else:
                exceeded = self.watch(capture, child, worker.replies, request["wall_s"])
            if exceeded is None:
                code = next(iter(os.read(worker.replies, 1)), None)
        ended = code is None
        if ended:
            self.worker = None
            self.end(child, kill=True)
            code = child.code
        elif self.is_init and self.settings["sweep"]:
            self.sweep(keep=child.pid)
        else:
            os.kill(child.pid, signal.SIGSTOP)
        capture.drain()
        self.send_end(request, began, capture, exceeded, child, code, variables_lost or ended)
        if ended:
            worker.close()

    def start_worker(self) -> None:
        """Fork a new worker process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self.worker = Worker(self.settings, self.null)
        self.children[self.worker.child.pid] = self.worker.child


def live_processes() -> list[int]:
    """Return the ids of all processes in which a thread runs."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                # A process whose first thread has ended is a zombie with other threads.
                if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
                    pids.append(int(name))
    return pids


def limit_self(settings: Settings) -> None:
    """Set the limits that every child process inherits."""
    bounds = {resource.RLIMIT_CORE: 0}
    if settings["open_files"] is not None:
        bounds[resource.RLIMIT_NOFILE] = settings["open_files"]
    for limit, bound in bounds.items():
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(limit, (bound, bound))


def main() -> None:
    """Set up the process and serve."""
    runner_pid = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        """Do nothing in the runner; in its children raise KeyboardInterrupt, as Python does."""
        if os.getpid() != runner_pid:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    settings: Settings = json.loads(sys.argv[1])
    if settings["hidden"]:
        prctl(PR_SET_DUMPABLE, 0)
    limit_self(settings)
    settings["last_fd"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if settings["egress"] is not None:
        offer_egress(settings["egress"])
    os.chdir(settings["work"])
    gc.freeze()  # a garbage collection in a child does not touch, and so copy, pages of existing objects
    Runner(settings).serve()


if __name__ == "__main__":
    main()
