"""Processes that start in milliseconds: forks of one process that has imported torch, Ray and agentrl.

``python tests/preloaded.py SOCKET MODULE...`` is that process. It imports the modules with the first request, has one
thread, and ends with its standard input, as do the processes that it started. `Forked` requests a process; it behaves like
`subprocess.Popen`, but its parent is the preloaded process. `Adopted` is a child of the process that requested it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import logging
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

SOCKET = "AGENTRL_TEST_PRELOADED"
"""Environment variable with the address of the preloaded process."""
WORKERS = "AGENTRL_TEST_RAY_WORKERS"
"""Environment variable with the address of the one whose forks are Ray's workers; see `ray_workers`."""
MODEL_MODULES = (
    "torch.distributed.checkpoint",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What loading the shipped policies imports."""
RUN_MODULES = (
    *MODEL_MODULES,
    "agentrl.cluster",
    "ray",
    "matplotlib.pyplot",
    "tensorboard.summary.writer.event_file_writer",
    "uvicorn",
    "starlette.applications",
    "bm25s",
    "agentrl.cli.main",
    "agentrl.cli.eval",
    "agentrl.cli.rollout",
    "agentrl.cli.train",
    "agentrl.learner.fsdp.rank",
    "agentrl.learner.in_process",
    "agentrl.train.preflight",
    "agentrl.render.template_check",
    "agentrl.toolserver.client",
    "agentrl_envs.search_r1",
    "agentrl_tasks.multihop",
    "agentrl_tools.search",
    "agentrl.inference.embedded.app",
    "agentrl.inference.embedded.scheduler",
    "agentrl.train.run",
)
"""What a run through the command line imports."""
ENGINE = "agentrl.inference.embedded"
RUNNER = "agentrl.runtime.runners.process"
TRIAL = "agentrl.tune.trial_process"
TARGETS = {
    ENGINE: f"{ENGINE}.__main__:main",
    RUNNER: f"{RUNNER}:main",
    TRIAL: f"{TRIAL}:main",
    "agentrl.cli.main": "agentrl.cli.main:main",
}
"""What ``python -m`` calls."""
CHILDREN = "AGENTRL_TEST_CHILDREN"
"""Environment variable with the address of a preloaded child of a process that runs tests; see `forked_tests`."""
MEGATRON = "AGENTRL_TEST_MEGATRON"
"""Environment variable with the address of a process whose forks are ranks of Megatron-Core."""
CHILD_MODULES = (
    *MODEL_MODULES,
    "uvicorn",
    "agentrl.inference.embedded.app",
    "agentrl.inference.embedded.stop_strings",
    "agentrl.cli.main",
    RUNNER,
)
"""What engines and tool servers import."""
_LENGTH = 4
_SET_NAME = 15
_NAME_LENGTH = 15
_SET_CHILD_SUBREAPER = 36
_ADOPTING = threading.Lock()


@dataclass(frozen=True)
class Request:
    """A process to be."""

    target: str
    """``module:function``; its result is the exit status."""
    arguments: Sequence[str]
    """``sys.argv`` without the program's name."""
    cwd: str
    """Its working directory, first in ``sys.path``."""
    env: Mapping[str, str]
    """Its whole environment."""
    files: Mapping[int, int]
    """Open files, by the number that each is to have."""
    orphan: bool = False
    """Fork twice, and forget about it."""
    forks: bool = False
    """Engines, tool servers and warm starts that it starts are forks of it, before it has done anything, and workers of
    its Ray are those of the process at ``WORKERS``."""


class Forked:
    """A process in a separate session, forked by the process at ``address``, by default the one at ``SOCKET``."""

    def __init__(self, request: Request, address: str | None = None) -> None:
        self.returncode: int | None = None
        self._socket = _send(address or os.environ[SOCKET], request)
        self.pid = int(_line(self._socket)["pid"])

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal that ended it), or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status."""
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
            self.returncode = int(_line(self._socket)["code"])
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill its whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def run(
    target: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float, forks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a forked process to its end, like ``subprocess.run`` with captured output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Forked(Request(target, arguments, str(cwd), env, {1: out.fileno(), 2: errors.fileno()}, forks=forks))
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # print where every thread is
            time.sleep(1)
            errors.seek(0)
            out.seek(0)
            process.end()
            raise AssertionError(f"no end after {timeout} s. It printed:\n{out.read()}{errors.read()}") from None
        except BaseException:
            process.end()
            raise
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read(), errors.read())


class Adopted:
    """A fork of a preloaded child of this process that is this process's child too, like one that it started itself.

    The preloaded process forks twice; the one between ends at once, and the kernel gives its orphan to the next process
    above that has declared itself a reaper.
    """

    def __init__(self, address: str, request: Request) -> None:
        self.returncode: int | None = None
        libc = ctypes.CDLL(None)
        with _ADOPTING:
            libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                with _send(address, replace(request, orphan=True)) as connection:
                    self.pid = int(_line(connection)["pid"])
                    assert _line(connection) == {"orphan": True}
            finally:
                libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def wait(self) -> int:
        """Wait for the end and return the exit status (negative: the signal that ended it)."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkedStarts:
    """Takes the place of ``subprocess`` where children are started: those of ``TARGETS`` are forks of a preloaded process."""

    DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT

    def __init__(self, address: str) -> None:
        self._address = address

    def Popen(
        self, command: list[str], *, stdout: Any, env: Mapping[str, str], pass_fds: Sequence[int], **options: Any
    ) -> subprocess.Popen[bytes] | Adopted:
        """Start a child."""
        target = TARGETS.get(command[2]) if command[:2] == [sys.executable, "-m"] else None
        if target is None:
            return subprocess.Popen(command, stdout=stdout, env=env, pass_fds=pass_fds, **options)
        files = {1: stdout.fileno(), 2: stdout.fileno(), **{number: number for number in pass_fds}}
        return Adopted(self._address, Request(target, command[3:], os.getcwd(), env, files))


def _send(address: str, request: Request) -> socket.socket:
    data = json.dumps(asdict(request)).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [len(data).to_bytes(_LENGTH, "big")], list(request.files.values()))
    connection.sendall(data)
    return connection


def _line(connection: socket.socket) -> Any:
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise RuntimeError("the preloaded process has ended")
        line += byte
    return json.loads(line)


@contextlib.contextmanager
def preloaded_process(*modules: str) -> Iterator[str]:
    """Have a preloaded process until the block ends; gives its address."""
    with tempfile.TemporaryDirectory(prefix="agentrl-", ignore_cleanup_errors=True) as folder:
        address = f"{folder}/preloaded"
        # A process with threads cannot be forked safely: NumPy would start some.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, address, *modules]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
        try:
            while not Path(address).exists():
                assert process.poll() is None, "the preloaded process does not start"
                time.sleep(0.005)
            yield address
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def start_imports(address: str) -> None:
    """Let the preloaded process import its modules now, and do not wait for it."""
    _send(address, Request("builtins:int", (), os.getcwd(), {}, {})).close()


# ---- the preloaded process -----------------------------------------------------------------------------------------


def _serve(address: str, modules: Sequence[str]) -> Request:
    """Fork for every request. Returns in the forks alone, with what they are to run."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    poller.register(listener, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for descriptor, _ in poller.poll():
            if descriptor == 0:
                with contextlib.suppress(OSError):
                    os.unlink(address)
                    os.rmdir(os.path.dirname(address))
                _end([pid for pid, _ in running.values()])
            elif descriptor in running:
                poller.unregister(descriptor)
                pid, client = running.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _tell(client, {"code": code})
                client.close()
            else:
                client, _ = listener.accept()
                request = _receive(client)
                if request is None:
                    client.close()
                    continue
                _preload(modules)
                pid = os.fork()
                if pid == 0 and request.orphan and (own_fork := os.fork()):
                    _tell(client, {"pid": own_fork})
                    os._exit(0)
                if pid == 0:
                    for other, (_, theirs) in running.items():
                        os.close(other)
                        theirs.close()
                    listener.close()
                    client.close()
                    return request
                for file in set(request.files.values()):
                    os.close(file)
                if request.orphan:
                    os.waitpid(pid, 0)
                    _tell(client, {"orphan": True})
                    client.close()
                    continue
                _tell(client, {"pid": pid})
                watched = os.pidfd_open(pid)
                running[watched] = (pid, client)
                poller.register(watched, select.POLLIN)


def _receive(client: socket.socket) -> Request | None:
    """Return the request of a client; None: it ended before it had sent it."""
    length, files, _, _ = socket.recv_fds(client, _LENGTH, 16)
    data, size = b"", int.from_bytes(length, "big")
    while len(data) < size and (received := client.recv(1 << 16)):
        data += received
    if not data or len(data) < size:
        for file in files:
            os.close(file)
        return None
    fields = json.loads(data)
    return Request(**fields | {"files": dict(zip(map(int, fields["files"]), files, strict=True))})


def _tell(client: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked for it is gone
        client.sendall(json.dumps(message).encode() + b"\n")


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _preload(modules: Sequence[str]) -> None:
    if modules and modules[-1] not in sys.modules:
        gc.disable()  # what is imported stays, and would be looked through a hundred times
        for name in modules:
            importlib.import_module(name)
        gc.freeze()
        gc.enable()


def _become(request: Request) -> int:
    """Make this fork what was requested, and run it."""
    os.setsid()
    # First away from the numbers that they are to have, of which one may be another's.
    files = {0: os.open(os.devnull, os.O_RDONLY), **request.files}
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 512) for number, file in files.items()}
    for file in set(files.values()):
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    random.seed()  # forks would draw the same numbers, from which Ray takes its ports
    logging.getLogger().handlers.clear()  # those of pytest, with which `logging.basicConfig` would add none
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ.pop(SOCKET, None)
    sys.argv = [request.target, *request.arguments]
    # Where `python -m` would look, and at the end this folder, which has targets of its own.
    extra = filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [request.cwd, *extra, *sys.path[1:], sys.path[0]]
    if (registry := sys.modules.get("agentrl.core.registry")) is not None:
        registry._all_entry_points.cache_clear()  # other folders may hold other packages
    module, _, name = request.target.partition(":")
    ctypes.CDLL(None).prctl(_SET_NAME, process_name(module).encode(), 0, 0, 0)
    if request.forks:
        child_process = importlib.import_module("agentrl.core.child_process")
        child_process.subprocess = ForkedStarts(fork_server()[0])  # type: ignore[attr-defined]
        if WORKERS in os.environ and "ray" in sys.modules:
            importlib.import_module("ray_workers").forked_workers().__enter__()
    return int(getattr(importlib.import_module(module), name)() or 0)


def process_name(module: str) -> str:
    """Return the kernel's name of a fork that runs a module; its command line is that of the preloaded process."""
    return module.removesuffix(".__main__")[-_NAME_LENGTH:]


def fork_server(*modules: str) -> tuple[str, int]:
    """Let a fork of this process be a preloaded one.

    Args:
        *modules: what it imports with the first request.

    Returns:
        its address, and an open file with which it ends: when this process closes it, or ends.
    """
    address = f"{tempfile.mkdtemp(prefix='agentrl-')}/preloaded"
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setpgid(0, 0)  # Ctrl-C is not for it
        os.close(writing)
        os.dup2(reading, 0)
        os.close(reading)
        _exit_as_interpreter(lambda: _become(_serve(address, modules)))
    os.close(reading)
    while not Path(address).exists():
        time.sleep(0.001)
    return address, writing


def _exit_as_interpreter(main: Callable[[], int]) -> NoReturn:
    """Call a function and end this process with its result, as an interpreter ends, whatever has called this function.

    All that an interpreter does at its end is done, but for the destruction of what was imported: a process that has
    imported torch, transformers and Ray takes two seconds for it, and copies all their memory.
    """
    code: object = 1
    try:
        code = main()
    except SystemExit as exit_request:
        code = exit_request.code
    except BaseException:
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _exit_as_interpreter(lambda: _become(_serve(sys.argv[1], sys.argv[2:])))
