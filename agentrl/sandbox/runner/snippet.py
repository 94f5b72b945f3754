"""The processes of calls inside a sandbox: how a forked child sets itself up and runs the policy's code.

The runner forks one for every call; see `runner.py`. This file, `children.py` and `runner.py` are read as text, joined,
and run by the sandbox's Python (3.9 or newer), so they use the standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
import types

TYPE_CHECKING = False  # typing's own would take a sandbox 5 ms to import
if TYPE_CHECKING:
    from typing import Any

    Request = dict[str, Any]
    Settings = dict[str, Any]

SIGKILL = 9
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
LENGTH = struct.Struct("<I")
SNIPPET = "<snippet>"
NOT_PERMITTED, NOT_FOUND = 126, 127
"""Exit status of a program that could not be run, as shells define it."""

MOST_CPU = resource.getrlimit(resource.RLIMIT_CPU)[1]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.splice.restype = ctypes.c_ssize_t


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def read_exactly(fd: int, size: int) -> bytes:
    """Return ``size`` bytes; end this process if the stream ends."""
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            os._exit(0)
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Request:
    """Return the next frame, without what follows it; see `runner_sandbox.py`."""
    request: Request = json.loads(read_exactly(fd, LENGTH.unpack(read_exactly(fd, LENGTH.size))[0]))
    return request


def splice(source: int, target: int, size: int) -> int:
    """Move up to ``size`` bytes within the kernel, not through this process. Returns how many; 0 at the end.

    One of the two descriptors is a pipe's.
    """
    moved: int = _libc.splice(source, None, target, None, ctypes.c_size_t(size), 0)
    if moved < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return moved


def read_job(file: int) -> Request:
    """Return the job of a call from the memory file that holds it; only processes of calls read it."""
    job: Request = json.loads(os.pread(file, os.fstat(file).st_size, 0))
    return job


def offer_egress(channel: int | str) -> None:
    """Listen on the proxy's address, and hand the listening socket over to the server; see `egress.py`.

    Args:
        channel: descriptor of a connected Unix socket, or the path of one.
    """
    import socket  # its import takes a few milliseconds, and is needed only here

    with socket.create_server(("127.0.0.1", 3128), backlog=64) as listener:
        if isinstance(channel, int):
            peer = socket.socket(fileno=channel)
        else:
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(channel)
        with peer:
            socket.send_fds(peer, [b"1"], [listener.fileno()])


def new_main() -> dict[str, Any]:
    """Return the namespace of a new module ``__main__``, which pickle and dataclasses find in place of the runner's."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


def run_code(code: str, namespace: dict[str, Any], name: str) -> int:
    """Run a snippet as ``__main__`` and return its exit status; a traceback shows only the snippet's lines."""
    linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
    status = 0
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    except SystemExit as end:
        status = exit_status(end.code)
    except BaseException as error:
        print_traceback(error)
        status = 1
    return status & 255


def exit_status(code: object) -> int:
    """Return the exit status of ``sys.exit(code)``; prints a code that is not a number, as Python does."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def print_traceback(error: BaseException) -> None:
    """Print a traceback without the frames of this file."""
    snippet_frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    with contextlib.suppress(BaseException):  # its __str__ is the snippet's, and may raise anything
        traceback.print_exception(type(error), error, snippet_frames)


def flush() -> int:
    """Flush standard output and error; return 1 if that fails."""
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # closed or replaced by the snippet
            status = 1
    return status


def finish() -> int:
    """Do what an interpreter does at its end: wait for threads, run atexit functions, flush."""
    if "threading" in sys.modules:
        with contextlib.suppress(BaseException):
            sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        with contextlib.suppress(BaseException):
            sys.modules["atexit"]._run_exitfuncs()
    return flush()


def limit_cpu(seconds: int, hard: bool) -> None:
    """Limit CPU time: ``hard`` for a new process, in total; otherwise to ``seconds`` more, for the worker of stateful calls."""
    if hard:  # the soft limit sends SIGXCPU, which can be caught, the hard one SIGKILL
        soft_limit, hard_limit = seconds, seconds + 1
    else:  # it must grow with the next call, which only the soft limit can
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft_limit, hard_limit = int(used.ru_utime + used.ru_stime + 0.999) + seconds, MOST_CPU  # in whole seconds
    if MOST_CPU != resource.RLIM_INFINITY:
        soft_limit, hard_limit = min(soft_limit, MOST_CPU), min(hard_limit, MOST_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft_limit, hard_limit))


def become_child(settings: Settings, fds: tuple[int, int, int], keep: tuple[int, ...] = ()) -> None:
    """Set up a forked process for the policy's code: a new session, only its descriptors, killed first when out of memory."""
    # This writes to as little memory as possible: each page that a fork writes to is copied, which takes microseconds.
    if os.getppid() != 1:  # process 1 takes all with it at its end
        prctl(PR_SET_PDEATHSIG, SIGKILL)
    os.setsid()
    for number, source in enumerate(fds):
        os.dup2(source, number)
    first = 3
    for fd in sorted(keep):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, settings["last_fd"])
    prctl(PR_SET_DUMPABLE, 1)  # not earlier: now none of the runner's descriptors is left to be opened
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:  # not writable everywhere; then the kernel chooses by size, and the runner is small
        pass
    limit_process(settings)
    sys.argv = [""]
    sys.dont_write_bytecode = True
    sys.path.insert(0, "")


def limit_process(settings: Settings) -> None:
    """Limit one process: the size of files, and if no cgroup limits all together, memory and processes."""
    for limit, bound in (
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_AS, settings["address_space"]),
        (resource.RLIMIT_NPROC, settings["processes"]),
    ):
        if bound is not None:
            resource.setrlimit(limit, (bound, bound))


def child_main(settings: Settings, file: int, fds: tuple[int, int, int]) -> None:
    """Run the code, or the program, of the job in a file. Never returns."""
    status = NOT_FOUND
    try:
        job = read_job(file)
        become_child(settings, fds)
        begin_job(settings, job, hard=True)
        if job["argv"]:
            exec_program(job["argv"])
        status = run_code(job["code"], new_main(), SNIPPET)
        status = finish() or status
    except BaseException as error:
        # A program or folder that does not exist: the policy's mistake.
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def begin_job(settings: Settings, job: Request, hard: bool) -> None:
    """Set environment, folder and limit of CPU time; see `limit_cpu`."""
    if job["env"]:
        os.environ.update(job["env"])
    os.chdir(os.path.join(settings["work"], job["cwd"]))
    if settings["cpu"]:
        limit_cpu(job["cpu_s"], hard)


def exec_program(argv: list[str]) -> None:
    """Execute a program, with default actions for the signals that Python ignores. Exits if that fails; never returns."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_PERMITTED if isinstance(error, PermissionError) else NOT_FOUND)


def worker_main(settings: Settings, fds: tuple[int, int, int], requests: int, replies: int) -> None:
    """Run snippets in one namespace, as the worker of stateful calls. Never returns."""
    become_child(settings, fds, keep=(requests, replies))
    namespace = new_main()
    worker_pid, number = os.getpid(), 0
    while True:
        job = receive(requests)
        number += 1
        try:
            begin_job(settings, job, hard=False)  # the limit of CPU time grows with every call
            # A name per snippet, so that tracebacks of later calls still show the lines of this one.
            status = run_code(job["code"], namespace, f"<snippet {number}>")
        except BaseException as error:
            print_traceback(error)
            status = 1
        status = flush() or status
        if os.getpid() != worker_pid:  # a process that the snippet forked, at its end
            os._exit(status)
        write_all(replies, bytes([status]))


def file_main(settings: Settings, file: int, fds: tuple[int, int, int]) -> None:
    """Write a file, or read one to standard output; the exit status is the errno. Never returns.

    The runner must not do it: a link to /proc/self/fd would lead to its own streams.
    """
    status = errno.EIO
    try:
        job = read_job(file)
        become_child(settings, fds)
        os.chdir(settings["work"])
        if job["write"]:
            write_file(job["path"], job["append"])
        else:
            read_file(job["path"], job["offset"], job["size"])
        status = 0
    except MemoryError:
        status = errno.ENOMEM
    except OSError as error:
        status = error.errno or errno.EIO
    except ValueError:  # a null byte or a lone surrogate in the path
        status = errno.EINVAL
    finally:
        os._exit(status)


def write_file(path: str, append: bool) -> None:
    """Write standard input to a file."""
    with contextlib.suppress(FileExistsError):  # if it is not a folder, open raises
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # Non-blocking: the policy may have created a FIFO there.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | (os.O_APPEND if append else os.O_TRUNC), 0o644)
    while True:
        chunk = os.read(0, 1 << 20)
        if not chunk:
            return
        write_all(fd, chunk)


def read_file(path: str, offset: int, size: int) -> None:
    """Write up to ``size`` bytes of a file, from ``offset``, to standard output."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if offset:
            file.seek(offset)
        write_all(1, file.read(size) or b"")
