"""Sandboxes that contain a runner: what backends share, whichever way they isolate.

The runner (`agentrl.sandbox.runner`) is a small Python program inside the sandbox. It is warm: it has started before the
first call, and forks a process for each. `RunnerSandbox` sends it calls and reads their results; `RunnerBackend` opens
and closes such sandboxes.

Requests and replies are frames: four bytes of length, then a JSON object with the request's id and the sizes of the bodies
that follow it. What is the policy's is in bodies, which the runner passes on unread: the job and its input, and the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import signal
import struct
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import orjson
from typing_extensions import override

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Outcome, Sandbox, SandboxBackend

LENGTH = struct.Struct("<I")
MAX_FRAME = 256 * 2**20
"""No reply is longer: the stream would not be the runner's."""
CHUNK_BYTES = 4 * 2**20
"""Bytes of a file per frame: the runner holds a few copies of it for a moment."""
REPLY_GRACE_S = 30.0
"""How long after a call's time limit the reply may come. A busy machine answers within it; a later reply is a fault."""
READY_S = 60.0
"""How long a runner may take to be ready."""


class ByteReader(Protocol):
    """Source of bytes: `asyncio.StreamReader`, or the reader of a container's stream."""

    async def readexactly(self, n: int) -> bytes:
        """Return n bytes, or raise `asyncio.IncompleteReadError` if the stream ends before."""
        ...


class RunnerSandbox(Sandbox):
    """Implements `Sandbox` by requests to a runner. Subclasses of backends end it and count memory kills.

    Args:
        sandbox_id: unique on this machine.
        reader: of the runner's replies.
        writer: of its requests. The runner exits when it is closed.
        limits: defaults of calls.
        defences: those that are on.
    """

    def __init__(
        self,
        sandbox_id: str,
        reader: ByteReader,
        writer: asyncio.StreamWriter,
        limits: SandboxLimits,
        defences: frozenset[Defence],
    ) -> None:
        self.id = sandbox_id
        self._reader = reader
        self._writer = writer
        self._requests = 0
        self._limits = limits
        self._defences = defences
        self._lock = asyncio.Lock()
        self._broken = ""
        self._closed: asyncio.Task[None] | None = None
        self.on_closed: Callable[[], None] = lambda: None
        """Called once it is closed."""

    @abstractmethod
    def _oom_kills(self) -> int:
        """Return how many of its processes the kernel has killed for lack of memory. May be called after the end."""

    @abstractmethod
    async def _destroy(self) -> None:
        """End all its processes and remove what it left on the machine. Called once."""

    @abstractmethod
    async def _describe_end(self) -> str:
        """Return what is known about why a runner no longer answers; empty if nothing is."""

    @property
    def alive(self) -> bool:
        """Whether it can take another call."""
        return not self._broken and self._closed is None

    async def ready(self) -> None:
        """Wait until the runner answers.

        Raises:
            SandboxFailure: it does not.
        """
        await self._request({"op": "ping"}, READY_S)

    @override
    async def run(self, job: Job) -> Outcome:
        """A cancelled call ends the sandbox: its state is unknown then."""
        limits = self._limits
        output = limits.output_kb * 1024 if job.output_bytes is None else job.output_bytes
        wall = limits.wall_s if job.wall_s is None else job.wall_s
        cpu_s = limits.cpu_s if job.cpu_s is None else job.cpu_s
        body = {"code": job.code, "argv": list(job.argv), "env": dict(job.env), "cwd": job.cwd, "cpu_s": cpu_s}
        request = {
            "op": "run",
            "wall_s": wall if Defence.WALL in self._defences else None,
            "output_bytes": output if Defence.OUTPUT in self._defences else None,
            "stateful": job.stateful,
        }
        async with self._lock:
            kills = self._oom_kills()
            try:
                reply, texts = await self._request(request, wall + REPLY_GRACE_S, body, job.stdin)
            except SandboxFailure:
                if self._oom_kills() > kills:
                    detail = "out of memory; the sandbox was ended, its files are lost"
                    return Outcome(ToolStatus.OUT_OF_MEMORY, "", "", None, 0.0, detail)
                raise
            limits_of_call = {**request, "cpu_s": cpu_s}
            return _outcome(reply, texts, limits_of_call, oom=self._oom_kills() > kills)

    @override
    async def write_file(self, path: str, content: bytes) -> None:
        async with self._lock:
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                chunk = content[start : start + CHUNK_BYTES]
                await self._file({"write": True, "path": path, "append": start > 0}, chunk)

    @override
    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        content = b""
        async with self._lock:
            while len(content) <= max_bytes:
                size = min(CHUNK_BYTES, max_bytes + 1 - len(content))
                chunk = await self._file({"write": False, "path": path, "offset": len(content), "size": size}, b"")
                content += chunk
                if len(chunk) < size:
                    return content
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)

    async def _file(self, job: dict[str, Any], stdin: bytes) -> bytes:
        """Write or read a part of a file; return what was read."""
        kills = self._oom_kills()
        try:
            reply, bodies = await self._request({"op": "file"}, REPLY_GRACE_S, job, stdin)
        except SandboxFailure:
            if self._oom_kills() > kills:
                raise OSError(errno.ENOMEM, "out of memory; the sandbox was ended", job["path"]) from None
            raise
        if "errno" in reply:
            raise OSError(reply["errno"], reply["error"], job["path"])
        return bodies[0]

    async def close(self) -> None:
        """End the sandbox; a second call waits for the first. A call in progress raises `SandboxFailure`."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._end(), name=f"close-{self.id}")
        await asyncio.shield(self._closed)

    async def _end(self) -> None:
        self._broken = self._broken or "it was closed"
        self._writer.close()
        try:
            await self._destroy()
        finally:
            self.on_closed()

    async def _request(
        self, fields: dict[str, Any], timeout_s: float, job: dict[str, Any] | None = None, stdin: bytes = b""
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request to the runner and return its reply, with the bodies; one at a time.

        Raises:
            SandboxFailure: the runner is gone or late, or sends something else than a frame; the sandbox is not `alive` then.
        """
        if not self.alive:
            raise SandboxFailure(f"sandbox {self.id} is gone: {self._broken or 'it was closed'}")
        self._requests += 1
        # Not orjson: it refuses lone surrogates, which a policy may write.
        bodies = [json.dumps(job).encode(), *([stdin] if stdin else [])] if job is not None else []
        request = json.dumps({**fields, "id": self._requests, "sizes": [len(body) for body in bodies]}).encode()
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                self._writer.write(b"".join([LENGTH.pack(len(request)), request, *bodies]))
                await self._writer.drain()
                while True:
                    reply, bodies = await self._read_frame()
                    if reply.get("id") == self._requests:  # otherwise it is late, and of an earlier request
                        return reply, bodies
        except (OSError, EOFError, ValueError) as error:
            if timeout.expired():
                self._broken = f"its runner did not answer in {timeout_s:g} s"
            elif not self._broken:  # otherwise it was closed during the call
                reason = await self._describe_end() or f"{type(error).__name__}: {error}"
                self._broken = self._broken or f"its runner is gone ({reason})"
        except BaseException:
            self._broken = "a call was cancelled"
            raise
        raise SandboxFailure(f"sandbox {self.id}: {self._broken}")

    async def _read_frame(self) -> tuple[dict[str, Any], list[bytes]]:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        reply = orjson.loads(await self._reader.readexactly(length))
        if not isinstance(reply, dict):
            raise ValueError(f"a frame with a {type(reply).__name__}")
        sizes = reply.get("sizes")
        if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size <= MAX_FRAME for size in sizes):
            raise ValueError(f"a frame with bodies of {sizes!r:.100} bytes")
        return reply, [await self._reader.readexactly(size) for size in sizes]


def _outcome(reply: dict[str, Any], bodies: list[bytes], request: dict[str, Any], *, oom: bool) -> Outcome:
    if "errno" in reply:  # the runner could not start the call: what earlier calls left fills memory or processes
        status = ToolStatus.OUT_OF_MEMORY if reply["errno"] == errno.ENOMEM or oom else ToolStatus.ERROR
        return Outcome(status, "", "", None, 0.0, f"the call could not be started: {reply['error']}")
    code: int | None = reply["exit_code"]
    status, detail = ToolStatus.OK, ""
    if oom:
        status, detail = ToolStatus.OUT_OF_MEMORY, "out of memory"
    elif reply["exceeded"] == "wall":
        status, detail = ToolStatus.TIMEOUT, f"timed out after {request['wall_s']:g} s"
    elif reply["exceeded"] == "output":
        status, detail = ToolStatus.OUTPUT_CUT, f"ended after printing {request['output_bytes']} bytes"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and reply["cpu_s"] >= request["cpu_s"]):
        status, detail = ToolStatus.TIMEOUT, "used up its CPU time"
    elif code is None or code < 0:
        status, detail = ToolStatus.KILLED, f"killed by {_signal_name(code)}"
    elif code:
        status = ToolStatus.ERROR
    if reply["variables_lost"]:
        detail += "; variables are lost" if detail else "the process ended, variables are lost"
    stdout, stderr = (body.decode("utf-8", "replace") for body in bodies)
    return Outcome(status, stdout, stderr, code, reply["seconds"], detail)


def _signal_name(code: int | None) -> str:
    try:
        return signal.Signals(-(code or 0)).name
    except ValueError:
        return f"signal {-(code or 0)}"


S = TypeVar("S", bound=RunnerSandbox)


class RunnerBackend(SandboxBackend, Generic[S]):
    """Opens and closes `RunnerSandbox`es, so that none is left behind by a cancelled `open` or by a `close` during one."""

    def __init__(self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES) -> None:
        super().__init__(config, defences)
        self._sandboxes: set[S] = set()
        self._starting: set[asyncio.Task[S]] = set()
        self._closing = False

    @abstractmethod
    async def _start_sandbox(self, session_id: str) -> S:
        """Return a new sandbox whose runner is starting. Never cancelled.

        Raises:
            SandboxFailure: it could not be made; nothing of it is left.
        """

    async def _await_ready(self, sandbox: S) -> None:
        """Wait until a new sandbox is ready for its first call."""
        await sandbox.ready()

    @override
    async def open(self, session_id: str) -> S:
        if self._closing:
            raise SandboxFailure("the sandbox backend is being closed")
        starting = asyncio.create_task(self._start(session_id), name=f"start-{session_id}")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            sandbox = await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxFailure):
                await (await starting).close()
            raise
        try:
            await self._await_ready(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _start(self, session_id: str) -> S:
        sandbox = await self._start_sandbox(session_id)
        self._sandboxes.add(sandbox)
        sandbox.on_closed = partial(self._sandboxes.discard, sandbox)
        return sandbox

    async def _close_sandboxes(self) -> None:
        """Close all sandboxes, those being opened included, and refuse to open others."""
        self._closing = True
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))


async def open_pipes(read_fd: int, write_fd: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the streams of two pipes, and take ownership of their file descriptors."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), io.FileIO(read_fd, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), io.FileIO(write_fd, "wb")
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
