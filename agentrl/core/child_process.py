"""Child processes that end with the process that started them.

The parent keeps the write end of a pipe open and hands the read end to the child. When the parent dies, even by
SIGKILL, the kernel closes the pipe; the child, which called `exit_with_parent` first thing, reads its end and ends.
Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing.connection
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self

from agentrl.core.errors import AgentrlError, PortInUseError

PARENT_FD = "AGENTRL_PARENT_FD"
"""Environment variable with the number of the file descriptor that ends when the parent does."""

ENDING_SIGNALS = frozenset({signal.SIGTERM, signal.SIGHUP})
"""Signals with which a batch system or a closed terminal ends all processes of a run. Only its driver acts on them."""

LOOPBACK = "127.0.0.1"
"""Address of servers that only this machine reaches."""

_POLL_S = 0.05
_MANY_FILES = 65536
# A proxy configured in the environment is not for our own servers on the loopback.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def reserve_port(host: str = LOOPBACK, port: int = 0, *, key: str = "port") -> Iterator[int]:
    """Reserve ``port`` (0: a free one) for a server that binds it by number, and yield it.

    Both sockets have SO_REUSEADDR and this one does not listen: Linux then lets the server bind the port, but does not
    give it to a process that binds port 0.

    Args:
        host: name or IPv4 address of this machine.
        port: 0 takes a free one.
        key: of the configuration, for the message.

    Raises:
        PortInUseError: something else listens there.
    """
    with socket.socket() as placeholder:
        # As servers do: a port whose last connections are only winding down is free.
        placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            placeholder.bind((host, port))
        except OSError as error:
            raise PortInUseError(
                f"{key}={port} cannot be used on {host} ({error.strerror}): set {key} to a free port, or to 0"
            ) from error
        bound_port = int(placeholder.getsockname()[1])
        yield bound_port


def raise_file_limit() -> None:
    """Allow this process as many open files as its user may have, 65536 at most: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))


def exit_with_parent() -> None:
    """End this process and its group as soon as the process that started it is gone.

    Called first thing in a child started by `ChildProcess`; does nothing in any other process.
    """
    number = os.environ.pop(PARENT_FD, None)
    if number is None:
        return
    descriptor = int(number)
    os.set_inheritable(descriptor, False)
    # Ray's processes block the signals that end a run, and so would an engine that one of them starts.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    threading.Thread(target=_end_on_close, args=(descriptor,), name="exit-with-parent", daemon=True).start()


def _end_on_close(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    sys.stderr.write("the process that started this one is gone: ending\n")
    sys.stderr.flush()
    # No orderly shutdown: the process that needs its outcome is dead, and a busy process might never get to it.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_main_process() -> None:
    """End this worker of `multiprocessing` as soon as the process that started the workers is gone.

    Its own end can wait forever: for its results to be read by the process that is gone.
    """
    main_process = multiprocessing.parent_process()
    assert main_process is not None, "this is no worker"

    def wait_and_end() -> None:
        multiprocessing.connection.wait([main_process.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_end, name="exit-with-main-process", daemon=True).start()


def worker_processes(modules: Sequence[str]) -> ForkServerContext:
    """Return the context of `multiprocessing` for data workers, and start its server, which imports ``modules``, unless it runs.

    This process has threads: if it were forked, a worker could hang in a lock that a thread held.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules])
    # Ctrl-C in a terminal reaches the server, too, which would end in a traceback while it imports.
    resource_tracker.ensure_running()  # the server starts it otherwise, and that unblocks the signal
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return context


def init_worker_process(worker: int) -> None:
    """Set up a worker of `multiprocessing`: it ignores signals that end the run, and ends with the main process.

    A worker that handled them could outlive the main process. ``worker`` is the worker's number.
    """
    for number in (signal.SIGINT, *ENDING_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    exit_with_main_process()


class StartedChildren:
    """The children that a context has started, which `end` ends, with any that it starts afterwards."""

    def __init__(self) -> None:
        self._children: list[ChildProcess] = []
        self._ended = False
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return self._ended

    def add(self, child: ChildProcess) -> None:
        """Take note of a child."""
        with self._lock:
            self._children.append(child)
            if self._ended:
                child.kill()

    def end(self) -> None:
        """Kill the children; the caller that started them still has to `stop` them."""
        with self._lock:
            self._ended = True
            for child in self._children:
                child.kill()


started_children: ContextVar[StartedChildren | None] = ContextVar("started_children", default=None)
"""Takes note of the children that the current context starts."""


class ChildProcess:
    """A child in its own process group, with its output in a log file. Made by `start`."""

    def __init__(
        self, process: subprocess.Popen[bytes], pipe: int, log: Path, name: str, error: type[AgentrlError]
    ) -> None:
        self._process = process
        self._pipe = pipe
        self._error = error
        self._stopped = False
        self.log = log
        self.name = name

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log: Path,
        name: str,
        env: Mapping[str, str] | None = None,
        error: type[AgentrlError] = AgentrlError,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start ``command``; what it prints is appended to ``log``.

        Args:
            command: program and arguments.
            log: file for standard output and error; its folder is made.
            name: what messages call the child.
            env: variables added to this process's environment.
            error: raised by this object's methods.
            pass_fds: file descriptors that the child inherits, with the same numbers.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        variables = {**os.environ, **(env or {}), PARENT_FD: str(reading), "PYTHONUNBUFFERED": "1"}
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    pass_fds=(reading, *pass_fds),
                    start_new_session=True,
                )
        except OSError as os_error:
            os.close(writing)
            raise error(f"{name} does not start: {os_error}") from os_error
        finally:
            os.close(reading)
        child = cls(process, writing, log, name, error)
        if (children := started_children.get()) is not None:
            children.add(child)
        return child

    @property
    def pid(self) -> int:
        """The child's process id, which is its group's id too."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit status (negative: the signal that ended it), or None while the child runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        # WNOWAIT leaves the dead child unreaped until `stop`, so that its group's id is not reused.
        exit_info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if exit_info is None:
            return None
        return exit_info.si_status if exit_info.si_code == os.CLD_EXITED else -exit_info.si_status

    def alive(self) -> bool:
        """Return whether the child runs."""
        return self.exit_code() is None

    def outcome(self) -> str:
        """Return how the child ended, such as ``exit status 1`` or ``signal SIGKILL``; empty while it runs."""
        code = self.exit_code()
        return "" if code is None else f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        """Raise the child's error class, with the end of its log, unless the child runs."""
        if outcome := self.outcome():
            raise self._error(f"{self.name} ended ({outcome}). The end of its log {self.log}:\n{self.log_tail()}")

    def wait_healthy(self, url: str, timeout_s: float) -> None:
        """Block until ``GET url`` (the whole address, such as ``http://127.0.0.1:8000/health``) answers 200.

        Raises:
            AgentrlError: of the class given to `start`: the child died, or did not answer and was stopped.
        """
        deadline = time.monotonic() + timeout_s
        while not is_healthy(url):
            try:
                self.check()
                if time.monotonic() > deadline:
                    raise self._error(
                        f"{self.name} does not answer at {url} after {timeout_s:g} s. "
                        f"The end of its log {self.log}:\n{self.log_tail()}"
                    )
            except AgentrlError:
                self.stop()
                raise
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the child and its whole group: by SIGTERM, then by SIGKILL after ``timeout_s``. A second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        self._signal(signal.SIGTERM)
        self.wait_ended(timeout_s)
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pipe)

    def wait_ended(self, timeout_s: float) -> None:
        """Wait until the child has ended, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill(self) -> None:
        """Send SIGKILL to the child and its whole group; `stop` is still to be called."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def __enter__(self) -> Self:
        """Return the child."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the child."""
        self.stop()


def is_healthy(url: str) -> bool:
    """Return whether ``GET url`` answers 200 within a second."""
    try:
        with _OPENER.open(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        # Not listening yet, or not ready (an HTTP error status): the caller asks again.
        return False
