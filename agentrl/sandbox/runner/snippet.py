"""What the processes of a call do inside a sandbox, before and while they run the policy's code.

The runner forks one for every call; see `runner.py`. This file, `children.py` and that one are read as text, joined, and
run inside by whichever Python is there (3.9 or newer), so they use the standard library only.
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
"""Exit status of what could not be run, as a shell has it."""

MOST_CPU = resource.getrlimit(resource.RLIMIT_CPU)[1]
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Change something about this process."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def read_exactly(fd: int, size: int) -> bytes:
    """Return size bytes; end this process where the stream ends."""
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> Request:
    """Return the next frame; see `link.py`."""
    request: Request = json.loads(read_exactly(fd, LENGTH.unpack(read_exactly(fd, LENGTH.size))[0]))
    return request


def send(fd: int, message: Request) -> None:
    """Write a frame."""
    data = json.dumps(message).encode()
    write_all(fd, LENGTH.pack(len(data)) + data)


def open_way_out(channel: int | str) -> None:
    """Listen where the proxy is to be, and hand the socket over; see `egress.py`.

    Args:
        channel: descriptor of a connected Unix socket, or the path of one.

    """
    import socket  # takes a few milliseconds, and is for this alone

    with socket.create_server(("127.0.0.1", 3128), backlog=64) as listener:
        if isinstance(channel, int):
            peer = socket.socket(fileno=channel)
        else:
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(channel)
        with peer:
            socket.send_fds(peer, [b"1"], [listener.fileno()])


def new_main() -> dict[str, Any]:
    """Return the namespace of a new ``__main__``, which pickle and dataclasses find there in place of the runner."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return module.__dict__


def run_code(code: str, namespace: dict[str, Any], name: str) -> int:
    """Run a snippet as ``__main__`` and return its exit status; a traceback shows the snippet's own lines alone."""
    linecache.cache[name] = (len(code), None, [line + "\n" for line in code.split("\n")], name)
    status = 0
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)
    except SystemExit as end:
        status = exit_status(end.code)
    except BaseException as error:
        show(error)
        status = 1
    return status & 255


def exit_status(code: object) -> int:
    """Return what ``sys.exit(code)`` means."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1


def show(error: BaseException) -> None:
    """Print a traceback without the frames of this file."""
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    with contextlib.suppress(BaseException):  # what it says is the snippet's: __str__ may raise anything
        traceback.print_exception(type(error), error, own)


def flush() -> int:
    """Write out what was printed; return 1 where that is not possible."""
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # closed, or put in its place by the snippet
            status = 1
    return status


def leave() -> int:
    """Do what an interpreter does at its end: wait for threads, run what is registered with atexit, write out."""
    if "threading" in sys.modules:
        with contextlib.suppress(BaseException):
            sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        with contextlib.suppress(BaseException):
            sys.modules["atexit"]._run_exitfuncs()
    return flush()


def limit_cpu(seconds: int, hard: bool) -> None:
    """Allow so many seconds of CPU time to a new process, for good, or so many more to one that keeps variables."""
    if hard:  # at the first limit comes SIGXCPU, which can be caught; at the second SIGKILL
        soft, last = seconds, seconds + 1
    else:  # both must grow with the next call, and only the first can
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft, last = int(used.ru_utime + used.ru_stime + 0.999) + seconds, MOST_CPU  # whole seconds is all it takes
    if MOST_CPU != resource.RLIM_INFINITY:
        soft, last = min(soft, MOST_CPU), min(last, MOST_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, last))


def become_child(settings: Settings, fds: tuple[int, int, int], keep: tuple[int, ...] = ()) -> None:
    """Turn a fresh fork into a process of the policy's: own session, own descriptors, first to go when memory ends."""
    # This touches as little as it can: each page of memory that a fresh fork writes to is copied, at microseconds each.
    if os.getppid() != 1:  # else all die with process 1
        prctl(PR_SET_PDEATHSIG, SIGKILL)
    os.setsid()
    for number, source in enumerate(fds):
        os.dup2(source, number)
    below = 3
    for fd in sorted(keep):
        os.closerange(below, fd)
        below = fd + 1
    os.closerange(below, settings["last_fd"])
    prctl(PR_SET_DUMPABLE, 1)  # only now: nothing of the runner's is left to be opened
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:  # not everywhere writable; the kernel picks by size then, and the runner is small
        pass
    if settings["address_space"] is not None or settings["processes"] is not None:
        limit_process(settings)
    sys.argv = [""]
    sys.dont_write_bytecode = True
    sys.path.insert(0, "")


def limit_process(settings: Settings) -> None:
    """Bound one process, where nothing bounds all together."""
    for what, bound in (
        (resource.RLIMIT_AS, settings["address_space"]),
        (resource.RLIMIT_NPROC, settings["processes"]),
    ):
        if bound is not None:
            resource.setrlimit(what, (bound, bound))


def child_main(settings: Settings, request: Request, fds: tuple[int, int, int]) -> None:
    """Run code, or a program. Never returns."""
    status = NOT_FOUND
    try:
        become_child(settings, fds)
        if request["env"]:
            os.environ.update(request["env"])
        os.chdir(request["cwd"])
        if settings["cpu"]:
            limit_cpu(request["cpu_s"], hard=True)
        if request["argv"]:
            become_program(request["argv"])
        status = run_code(request["code"], new_main(), SNIPPET)
        status = leave() or status
    except BaseException as error:
        # A program that is not there, a folder that is gone: the policy's mistake.
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(status)


def become_program(argv: list[str]) -> None:
    """Go on as another program, with the signals that Python ignores as they were. Returns where there is none."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(NOT_PERMITTED if isinstance(error, PermissionError) else NOT_FOUND)


def worker_main(settings: Settings, fds: tuple[int, int, int], requests: int, replies: int) -> None:
    """Be the process that keeps variables: run snippets in one namespace. Never returns."""
    become_child(settings, fds, keep=(requests, replies))
    namespace = new_main()
    me, number = os.getpid(), 0
    while True:
        request = receive(requests)
        number += 1
        try:
            os.environ.update(request["env"])
            os.chdir(request["cwd"])
            if settings["cpu"]:
                limit_cpu(request["cpu_s"], hard=False)  # the limit must grow with the next call
            # A name of its own: tracebacks of later calls still show the lines of this one.
            status = run_code(request["code"], namespace, f"<snippet {number}>")
        except BaseException as error:
            show(error)
            status = 1
        status = flush() or status
        if os.getpid() != me:  # a fork of the snippet's that came to its end
            os._exit(status)
        write_all(replies, bytes([status]))


def file_main(settings: Settings, request: Request, fds: tuple[int, int, int]) -> None:
    """Write a file, or read one to standard output; the exit status is the errno. Never returns.

    Not the runner's to do: a link to /proc/self/fd would lead it to its own streams.
    """
    status = errno.EIO
    try:
        become_child(settings, fds)
        os.chdir(settings["work"])
        if request["op"] == "write":
            write_file(request["path"], request["append"])
        else:
            read_file(request["path"], request["offset"], request["size"])
        status = 0
    except MemoryError:
        status = errno.ENOMEM
    except OSError as error:
        status = error.errno or errno.EIO
    except ValueError:  # a null byte, or half a character, in the path
        status = errno.EINVAL
    finally:
        os._exit(status)


def write_file(path: str, append: bool) -> None:
    """Write standard input to a file."""
    with contextlib.suppress(FileExistsError):  # where that is no folder, the next line says so
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # Not blocking: the policy may have put a FIFO there.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | (os.O_APPEND if append else os.O_TRUNC), 0o644)
    while True:
        part = os.read(0, 1 << 20)
        if not part:
            return
        write_all(fd, part)


def read_file(path: str, offset: int, size: int) -> None:
    """Write a part of a file to standard output."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if offset:
            file.seek(offset)
        write_all(1, file.read(size) or b"")
