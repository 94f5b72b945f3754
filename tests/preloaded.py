"""Processes that start in milliseconds: forks of one process that has imported torch, Ray and agentrl.

``python tests/preloaded.py SOCKET`` is that process. It imports nothing heavy until the first request, has one thread, and
ends with its standard input, as do the processes that it started. `Forked` requests a process; it behaves like
`subprocess.Popen`, but its parent is the preloaded process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOCKET = "AGENTRL_TEST_PRELOADED"
"""Environment variable with the address of the preloaded process."""
MODULES = (
    "torch",
    "torch.distributed.checkpoint",
    "transformers",
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
    "agentrl.inference.embedded.app",
    "agentrl.inference.embedded.scheduler",
    "agentrl.train.run",
)
_LENGTH = 4


class Forked:
    """A process that runs ``function`` of ``module`` with ``sys.argv``, in a session of its own.

    Args:
        target: ``module:function``; its result is the exit status.
        arguments: ``sys.argv`` without the program's name.
        cwd: its working directory, first in ``sys.path``.
        env: its whole environment.
        stdout: file descriptor.
        stderr: file descriptor.

    """

    def __init__(
        self,
        target: str,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
    ) -> None:
        self.returncode: int | None = None
        request = {"target": target, "arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SOCKET])
        data = json.dumps(request).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(_LENGTH, "big")], [stdout, stderr])
        self._socket.sendall(data)
        self.pid = int(json.loads(self._line())["pid"])

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            part = self._socket.recv(1)
            if not part:
                raise RuntimeError("the preloaded process has ended")
            line += part
        return line

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
            self.returncode = int(json.loads(self._line())["code"])
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def run(
    target: str, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a forked process to its end, like ``subprocess.run`` with captured output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Forked(target, arguments, cwd=cwd, env=env, stdout=out.fileno(), stderr=errors.fileno())
        try:
            code = process.wait(timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(list(arguments), code, out.read(), errors.read())


@contextlib.contextmanager
def preloaded_process() -> Iterator[None]:
    """Have a preloaded process, for this process and those that it starts, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        address = f"{folder}/preloaded"
        # NumPy's threads would make forks unsafe, and rows of tiny matrices gain nothing by them.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, address], stdin=subprocess.PIPE, env=env, start_new_session=True
        )
        os.environ[SOCKET] = address
        try:
            while not Path(address).exists():
                assert process.poll() is None, "the preloaded process does not start"
                time.sleep(0.005)
            yield
        finally:
            del os.environ[SOCKET]
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


# ---- the preloaded process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A process to be."""

    target: str
    arguments: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    files: Sequence[int]


def _serve(address: str) -> Request:
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
                _preload()
                pid = os.fork()
                if pid == 0:
                    for other, (_, theirs) in running.items():
                        os.close(other)
                        theirs.close()
                    listener.close()
                    client.close()
                    return request
                for file in request.files:
                    os.close(file)
                _tell(client, {"pid": pid})
                watched = os.pidfd_open(pid)
                running[watched] = (pid, client)
                poller.register(watched, select.POLLIN)


def _receive(client: socket.socket) -> Request:
    length, files, _, _ = socket.recv_fds(client, _LENGTH, 2)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += client.recv(1 << 16)
    return Request(**json.loads(data), files=files)


def _tell(client: socket.socket, told: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked for it is gone
        client.sendall(json.dumps(told).encode() + b"\n")


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _preload() -> None:
    if "torch" not in sys.modules:
        for name in MODULES:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()


def _become(request: Request) -> int:
    """Make this fork what was requested, and run it."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate((null, *request.files)):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    os.environ.pop(SOCKET, None)
    sys.argv = [request.target, *request.arguments]
    # Where `python -m` would look, and at the end this folder, which has targets of its own.
    extra = filter(None, request.env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [request.cwd, *extra, *sys.path[1:], sys.path[0]]
    module, _, name = request.target.partition(":")
    return int(getattr(importlib.import_module(module), name)() or 0)


if __name__ == "__main__":
    sys.exit(_become(_serve(sys.argv[1])))
