"""The warm runner: process 1 of a sandbox. It forks a process for every call, bounds it, and cleans up after it.

Its first parts are `snippet.py` and `children.py`. Its one argument is JSON, see `settings` in warm.py. Requests come on
standard input, replies go to what standard output was at the start; `link.py` has the frames.

As process 1 of its PID namespace it takes no signal from inside, SIGKILL and SIGSTOP included; it is not dumpable, so
that its memory and files cannot be opened through /proc; and it opens no path that the policy could have laid. So
whatever ends it comes from outside, or from the kernel's out-of-memory killer.
"""

from __future__ import annotations

import binascii
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
    PR_SET_DUMPABLE,
    TYPE_CHECKING,
    child_main,
    file_main,
    open_way_out,
    prctl,
    receive,
    send,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandbox.runner.snippet import Request, Settings

REAP_S = 0.1
"""How often the dead that a call orphans are buried while it runs: they count as processes."""
FILE_S = 10.0
"""How long reading or writing a file may take."""


class Runner:
    """Answers requests, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replies, self.requests = os.dup(1), os.dup(0)
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(self.null, fd)
        self.worker: Worker | None = None
        self.children: dict[int, Child] = {}
        """Those that are not buried."""
        self.alone = os.getpid() == 1
        """Whether every process we see is one of ours."""

    def serve(self) -> None:
        """Answer until the stream ends."""
        while True:
            request = receive(self.requests)
            reply = self.handle(request)
            reply["id"] = request["id"]
            send(self.replies, reply)

    def handle(self, request: Request) -> Request:
        """Return the reply, or the error that kept a call from being started."""
        try:
            if request["op"] == "ping":
                return {"python": sys.version.split()[0], "pid": os.getpid()}
            if request["op"] != "run":
                return self.run_file(request)
            began = time.monotonic()
            request["cwd"] = os.path.join(self.settings["work"], request["cwd"])
            reply = self.run_stateful(request) if request["stateful"] else self.run_once(request)
            reply["seconds"] = time.monotonic() - began
            return reply
        except MemoryError:
            return {"errno": errno.ENOMEM, "error": "out of memory"}
        except OSError as error:
            return {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}

    def run_file(self, request: Request) -> Request:
        """Read or write a file in a process of its own."""
        capture, why, child = self.run_child(request, file_main, None, FILE_S)
        if why is not None or child.code:
            number = (
                errno.ETIMEDOUT if why is not None else errno.ENOMEM if child.code == -9 else child.code or errno.EIO
            )
            return {"errno": number, "error": os.strerror(number)}
        return {"content": binascii.b2a_base64(capture.data[capture.out_read], newline=False).decode()}

    def run_once(self, request: Request) -> Request:
        """Run code or a program in a process of its own."""
        capture, why, child = self.run_child(request, child_main, request["output_bytes"], request["wall_s"])
        if why is None and capture.over:
            why = "output"
        code = None if why else child.code
        return {"why": why, "exit_code": code, "cpu_s": child.cpu_s, **capture.texts()}

    def run_child(
        self,
        request: Request,
        main: Callable[[Settings, Request, tuple[int, int, int]], None],
        output_bytes: int | None,
        wall_s: float | None,
    ) -> tuple[Capture, str | None, Child]:
        """Fork, watch, and clean up; return what was printed, which limit ended it, and the process that was."""
        capture = Capture()
        capture.begin(output_bytes)
        stdin = self.null
        try:
            try:
                stdin = self.stdin_of(request)
                fds = (stdin, capture.out_write, capture.err_write)
                child = Child(lambda: main(self.settings, request, fds))
            finally:
                capture.close_writers()
                if stdin != self.null:
                    os.close(stdin)
            self.children[child.pid] = child
            try:
                why = self.watch(capture, child, None, wall_s)
                self.end(child, kill=why is not None)
            finally:
                child.close()
            capture.drain()
            return capture, why, child
        finally:
            capture.close()

    def stdin_of(self, request: Request) -> int:
        """Return a descriptor that the request's input can be read from."""
        data = binascii.a2b_base64(request["stdin"])
        if not data:
            return self.null
        fd = os.memfd_create("stdin")
        try:
            write_all(fd, data)
            os.lseek(fd, 0, os.SEEK_SET)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def watch(self, capture: Capture, child: Child, replies: int | None, wall_s: float | None) -> str | None:
        """Read until the process has exited, or says that it is done. Returns which limit ended the call, or None."""
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
            ready = [fd for fd, _ in poll.poll(wait * 1000)]
            for fd in ready:
                if fd in capture.data:
                    capture.take(fd)
            if capture.over:
                return "output"
            if any(fd in ready for fd in done):
                return None
            if not ready:
                self.bury()

    # ---- the end of a call

    def end(self, child: Child, kill: bool) -> None:
        """End everything of this call, and bury it."""
        if kill or not self.alone:  # while it is not buried, its number is nobody else's
            self.kill_group(child.pid)
        if self.alone and self.settings["sweep"]:
            self.sweep(keep=self.worker.child.pid if self.worker else None)
        while child.code is None:
            self.bury(child.pid, 0)

    def sweep(self, keep: int | None) -> None:
        """Kill every process but this one, and one to keep. Only in a PID namespace of our own."""
        # Nothing forks while this is sent, and what is stopped does not fork after it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL if keep is None else signal.SIGSTOP)
        if keep is None:
            while self.bury(-1, 0):  # whatever is orphaned becomes our child
                pass
            return
        while True:
            others = [pid for pid in living() if pid not in (1, keep)]
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.bury()
            if not others:
                return
            time.sleep(0.0005)

    def bury(self, pid: int = -1, flags: int = os.WNOHANG) -> bool:
        """Reap the dead: all of them, or the first that dies. Returns whether there may be more."""
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
        """Kill a process and its process group, which may be gone already."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    # ---- variables that stay

    def run_stateful(self, request: Request) -> Request:
        """Run a snippet in the worker; start it, where there is none."""
        lost = self.worker is not None and self.worker.child.code is not None
        if self.worker is None or lost:
            self.start_worker()
        worker = self.worker
        assert worker is not None
        capture, child = worker.capture, worker.child
        capture.begin(request["output_bytes"])
        os.kill(child.pid, signal.SIGCONT)
        why, code = None, None
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it closed its ends, or ended
            if not worker.send({key: request[key] for key in ("code", "env", "cwd", "cpu_s")}, request["wall_s"]):
                why = "wall"
            else:
                why = self.watch(capture, child, worker.replies, request["wall_s"])
            if why is None:
                code = next(iter(os.read(worker.replies, 1)), None)
        ended = code is None
        if ended:
            self.worker = None
            self.end(child, kill=True)
            code = child.code
        elif self.alone and self.settings["sweep"]:
            self.sweep(keep=child.pid)
        else:
            os.kill(child.pid, signal.SIGSTOP)
        capture.drain()
        if why is None and capture.over:
            why = "output"
        reply = {"why": why, "exit_code": None if why else code, "cpu_s": child.cpu_s, "variables_lost": lost or ended}
        reply.update(capture.texts())
        if ended:
            worker.close()
        return reply

    def start_worker(self) -> None:
        """Fork it anew."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self.worker = Worker(self.settings, self.null)
        self.children[self.worker.child.pid] = self.worker.child


def living() -> list[int]:
    """Return the processes that there are, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    found.append(int(name))
    return found


def limit_self(settings: Settings) -> None:
    """Set the limits that every process inherits."""
    bounds = {resource.RLIMIT_CORE: 0}
    if settings["file_bytes"] is not None:
        bounds[resource.RLIMIT_FSIZE] = settings["file_bytes"]
    if settings["open_files"] is not None:
        bounds[resource.RLIMIT_NOFILE] = settings["open_files"]
    for what, bound in bounds.items():
        hard = resource.getrlimit(what)[1]
        if hard != resource.RLIM_INFINITY:
            bound = min(bound, hard)
        resource.setrlimit(what, (bound, bound))


def main() -> None:
    """Run."""
    me = os.getpid()

    def interrupt(number: int, frame: object) -> None:
        """Do nothing in the runner, whom nothing else from inside reaches; in its children what Python does."""
        if os.getpid() != me:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    settings: Settings = json.loads(sys.argv[1])
    if settings["hidden"]:
        prctl(PR_SET_DUMPABLE, 0)
    limit_self(settings)
    settings["last_fd"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if settings["egress"] is not None:
        open_way_out(settings["egress"])
    os.chdir(settings["work"])
    gc.freeze()  # no collection of a child's looks at what is there now, and so copies its pages
    Runner(settings).serve()


if __name__ == "__main__":
    main()
