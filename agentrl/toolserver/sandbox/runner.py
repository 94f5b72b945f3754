"""The warm runner: process 1 of a sandbox. It forks a process for every call, bounds it, and cleans up after it.

This file is read as text and run inside the sandbox, by whichever Python is there (3.9 or newer): standard library
only. Its one argument is JSON, see `settings` in warm.py. Requests come on standard input, replies go to what standard
output was at the start; `link.py` has the frames.

As process 1 of its PID namespace it takes no signal from inside, SIGKILL and SIGSTOP included; and it is not dumpable,
so that its memory and files cannot be opened through /proc. So whatever ends it comes from outside, or from the
kernel's out-of-memory killer.
"""

import base64
import builtins
import contextlib
import ctypes
import errno
import json
import linecache
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback

PR_SET_DUMPABLE = 4
LENGTH = struct.Struct("<I")
CHUNK = 65536
SWEEP_S = 5.0
SNIPPET = "<snippet>"

_prctl = ctypes.CDLL(None, use_errno=True).prctl


def set_dumpable(yes):
    if _prctl(PR_SET_DUMPABLE, int(yes), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def read_exactly(fd, size):
    """Return size bytes; end this process where the stream ends."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd):
    return json.loads(read_exactly(fd, LENGTH.unpack(read_exactly(fd, LENGTH.size))[0]))


def send(fd, message):
    data = json.dumps(message).encode()
    write_all(fd, LENGTH.pack(len(data)) + data)


# ---- what runs in the child -------------------------------------------------------------------------------------


def run_code(code, namespace):
    """Run a snippet as __main__ and return its exit status; a traceback shows the snippet's own lines alone."""
    linecache.cache[SNIPPET] = (len(code), None, code.splitlines(True), SNIPPET)
    status = 0
    try:
        exec(compile(code, SNIPPET, "exec", dont_inherit=True), namespace)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        show(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            status = status or 1
    return status & 255


def show(error):
    """Print a traceback without the frames of this file."""
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    with contextlib.suppress(BaseException):
        traceback.print_exception(type(error), error, own)


def new_namespace():
    return {"__name__": "__main__", "__builtins__": builtins}


def limit_cpu(seconds):
    """Allow so many more seconds of CPU time than were used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, hard))


def become_child(stdin, stdout, stderr, keep=()):
    """Turn a fresh fork into a process of the policy's: own session, own descriptors, first to go when memory ends."""
    os.setsid()
    set_dumpable(True)
    # Not everywhere writable; without it the kernel picks by size, and the runner is small.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    for number, source in enumerate((stdin, stdout, stderr)):
        os.dup2(source, number)
    below = 3
    for fd in sorted(keep):
        os.closerange(below, fd)
        below = fd + 1
    os.closerange(below, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.argv = [""]


def child_main(request, stdin, stdout, stderr, cpu):
    """Never returns."""
    try:
        become_child(stdin, stdout, stderr)
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if cpu:
            limit_cpu(request["cpu_s"])
        if request["argv"]:
            os.execvpe(request["argv"][0], request["argv"], os.environ)
        status = run_code(request["code"], new_namespace())
    except BaseException as error:
        with contextlib.suppress(BaseException):
            # A program that is not there, a folder that is gone: the policy's mistake, in the shell's words and status.
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 126 if isinstance(error, PermissionError) else 127
    os._exit(status)


def worker_main(control, stdin, stdout, stderr, cpu):
    """The process that keeps variables: runs snippets in one namespace. Never returns."""
    become_child(stdin, stdout, stderr, keep=(control,))
    namespace = new_namespace()
    me = os.getpid()
    while True:
        request = receive(control)
        try:
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if cpu:
                limit_cpu(request["cpu_s"])
            status = run_code(request["code"], namespace)
        except BaseException as error:
            show(error)
            status = 1
        if os.getpid() != me:  # a fork of the snippet's that fell through to here
            os._exit(status)
        write_all(control, bytes([status]))


# ---- the runner -------------------------------------------------------------------------------------------------


class Capture:
    """What a call prints, up to a limit."""

    def __init__(self, limit):
        self.out_read, self.out_write = os.pipe2(os.O_CLOEXEC)
        self.err_read, self.err_write = os.pipe2(os.O_CLOEXEC)
        for fd in (self.out_read, self.err_read):
            os.set_blocking(fd, False)
        self.data = {self.out_read: bytearray(), self.err_read: bytearray()}
        self.open = [self.out_read, self.err_read]
        self.limit = limit
        self.total = 0

    def close_writers(self):
        os.close(self.out_write)
        os.close(self.err_write)

    def close(self):
        os.close(self.out_read)
        os.close(self.err_read)

    @property
    def over(self):
        return self.limit is not None and self.total > self.limit

    def take(self, fd):
        """Read once. Returns whether there was something."""
        try:
            part = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        if not part:
            if fd in self.open:
                self.open.remove(fd)
            return False
        room = len(part) if self.limit is None else max(0, self.limit - self.total)
        self.data[fd] += part[:room]
        self.total += len(part)
        return True

    def drain(self):
        """Read what is there without waiting."""
        while not self.over and any([self.take(fd) for fd in list(self.open)]):
            pass

    def texts(self):
        return [bytes(self.data[fd]).decode("utf-8", "replace") for fd in (self.out_read, self.err_read)]


class Worker:
    """The one process that keeps variables from call to call. It is stopped between calls."""

    def __init__(self, runner):
        self.capture = Capture(None)
        ours, theirs = socket.socketpair()
        self.control = ours.detach()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                worker_main(
                    theirs.fileno(), runner.null, self.capture.out_write, self.capture.err_write, runner.settings["cpu"]
                )
            finally:
                os._exit(1)
        theirs.close()
        self.capture.close_writers()

    def close(self):
        self.capture.close()
        os.close(self.control)


class Runner:
    def __init__(self, settings):
        self.settings = settings
        self.replies = os.dup(1)
        self.requests = os.dup(0)
        for fd in (self.replies, self.requests):
            os.set_inheritable(fd, False)
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1, 2):
            os.dup2(self.null, fd)
        self.worker = None
        self.alone = os.getpid() == 1

    def serve(self):
        while True:
            request = receive(self.requests)
            reply = self.handle(request)
            reply["id"] = request["id"]
            send(self.replies, reply)

    def handle(self, request):
        try:
            return getattr(self, "op_" + request["op"])(request)
        except MemoryError:
            return {"errno": errno.ENOMEM, "error": "out of memory"}
        except OSError as error:
            return {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}

    def op_ping(self, request):
        return {"python": sys.version.split()[0], "pid": os.getpid()}

    def op_write(self, request):
        path = os.path.join(self.settings["work"], request["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(request["content"]))
        return {}

    def op_read(self, request):
        path = os.path.join(self.settings["work"], request["path"])
        # Not blocking: the policy may have put a FIFO there.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(request["max_bytes"] + 1)
        if len(content) > request["max_bytes"]:
            raise OSError(errno.EFBIG, "larger than %d bytes" % request["max_bytes"])
        return {"content": base64.b64encode(content).decode()}

    def op_run(self, request):
        began = time.monotonic()
        request["cwd"] = os.path.join(self.settings["work"], request["cwd"])
        outcome = self.run_stateful(request) if request["stateful"] else self.run_once(request)
        outcome["seconds"] = time.monotonic() - began
        return outcome

    def run_once(self, request):
        capture = Capture(request["output_bytes"])
        stdin = self.stdin_of(request)
        try:
            pid = os.fork()
            if pid == 0:
                child_main(request, stdin, capture.out_write, capture.err_write, self.settings["cpu"])
            capture.close_writers()
            exited = os.pidfd_open(pid)
            try:
                why = self.watch(capture, exited, request["wall_s"])
            finally:
                os.close(exited)
            code = self.end(pid, kill=why is not None)
            capture.drain()
            if why is None and capture.over:
                why = "output"
            stdout, stderr = capture.texts()
            return {"why": why, "exit_code": None if why else code, "stdout": stdout, "stderr": stderr}
        finally:
            capture.close()
            if stdin != self.null:
                os.close(stdin)

    def stdin_of(self, request):
        data = base64.b64decode(request["stdin"])
        if not data:
            return self.null
        fd = os.memfd_create("stdin")
        write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def watch(self, capture, exited, wall_s):
        """Read until the process has exited and nothing more comes. Returns which limit ended the call, or None."""
        deadline = time.monotonic() + wall_s if wall_s is not None else None
        gone = False
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return "wall"
            wait = 0 if gone else left
            ready = select.select([*capture.open, *([] if gone else [exited])], [], [], wait)[0]
            some = any([capture.take(fd) for fd in ready if fd != exited])
            if capture.over:
                return "output"
            if gone and not some:
                return None  # what still holds the pipes is a process left behind
            gone = gone or exited in ready

    def end(self, pid, kill):
        """End everything of this call and return the main process's exit status."""
        if kill:
            self.kill_group(pid)
        if self.settings["sweep"]:
            self.sweep(keep=self.worker.pid if self.worker else None)
        code = None
        deadline = time.monotonic() + SWEEP_S
        while True:
            try:
                done, status = os.waitpid(
                    -1 if self.alone and code is not None else pid, os.WNOHANG if code is not None else 0
                )
            except ChildProcessError:
                break
            if done == pid:
                code = os.waitstatus_to_exitcode(status)
                if not self.alone:
                    break
            elif done == 0:
                if not self.settings["sweep"] or not self.others(self.worker.pid if self.worker else None):
                    break
                if time.monotonic() > deadline:
                    break  # in the kernel's hands, such as a large exit of memory; the next sweep meets it again
                time.sleep(0.001)
        if not self.alone:
            self.kill_group(pid)
        return code

    def kill_group(self, pid):
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)

    def sweep(self, keep=None):
        """Kill every process but this one, and ``keep``. Only in a PID namespace of our own."""
        if not self.alone:
            return
        if keep is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            return
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            others = self.others(keep)
            if not others:
                return
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap(keep)

    def others(self, keep):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if pid not in (1, keep) and not self.is_zombie(pid)]

    def is_zombie(self, pid):
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
        except OSError:
            return True

    def reap(self, keep):
        with contextlib.suppress(ChildProcessError):
            while True:
                done, status = os.waitpid(-1, os.WNOHANG)
                if done == 0:
                    return
                if done == keep:
                    self.worker_status = status

    # ---- variables that stay

    def run_stateful(self, request):
        fresh = self.worker is None
        if fresh:
            self.worker = Worker(self)
        worker, capture = self.worker, self.worker.capture
        capture.limit, capture.total = request["output_bytes"], 0
        for data in capture.data.values():
            data.clear()
        os.kill(worker.pid, signal.SIGCONT)
        exited = os.pidfd_open(worker.pid)
        try:
            fields = {key: request[key] for key in ("code", "env", "cwd", "cpu_s")}
            why, code = self.watch_worker(worker, exited, fields, request["wall_s"])
        finally:
            os.close(exited)
        capture.drain()
        if why is None and capture.over:
            why = "output"
        stdout, stderr = capture.texts()
        lost = why is not None or code is None
        if lost:
            code = self.lose_worker()
        else:
            os.kill(worker.pid, signal.SIGSTOP)
            if self.settings["sweep"]:
                self.sweep(keep=worker.pid)
        return {
            "why": why,
            "exit_code": None if why else code,
            "stdout": stdout,
            "stderr": stderr,
            "variables_lost": lost,
        }

    def watch_worker(self, worker, exited, fields, wall_s):
        """Return which limit ended the call, or None, and the exit status, or None where the process died."""
        deadline = time.monotonic() + wall_s if wall_s is not None else None
        try:
            send(worker.control, fields)
        except OSError:
            return None, None
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return "wall", None
            ready = select.select([*worker.capture.open, worker.control, exited], [], [], left)[0]
            for fd in ready:
                if fd in worker.capture.data:
                    worker.capture.take(fd)
            if worker.capture.over:
                return "output", None
            if worker.control in ready:
                said = os.read(worker.control, 1)
                return None, said[0] if said else None
            if exited in ready:
                return None, None

    def lose_worker(self):
        """End the process that kept the variables; return its exit status."""
        worker, self.worker = self.worker, None
        code = self.end(worker.pid, kill=True)
        worker.close()
        return code


def limit_self(settings):
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
    if settings["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main():
    settings = json.loads(sys.argv[1])
    if settings["hidden"]:
        set_dumpable(False)
    limit_self(settings)
    os.chdir(settings["work"])
    Runner(settings).serve()


if __name__ == "__main__":
    main()
