"""A sandbox with a warm runner in it, whatever keeps the two: calls, limits, and what became of a call."""

from __future__ import annotations

import asyncio
import base64
import errno
import importlib.resources
import re
import signal
from abc import abstractmethod
from functools import cache
from typing import Any

import orjson

from agentrl.config.sandbox import SandboxLimits
from agentrl.core.errors import SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import WORK, Defence, Job, Outcome, Sandbox
from agentrl.sandbox.runner_link import LinkError, RunnerLink

RUNNER_PARTS = ("snippet", "children", "runner")
PART = 4 * 2**20
"""Bytes of a file that go into one frame: the runner has a few copies of it for a moment."""
GRACE_S = 30.0
"""How long after its time a reply may come: what answers later is no busy machine but a fault."""
READY_S = 60.0
"""How long a runner may take to be ready."""


@cache
def runner_source() -> str:
    """Return the program that runs inside: its modules as one text, since nothing of agentrl is there to import."""
    here = importlib.resources.files("agentrl.sandbox.runner")
    first, *others = (here.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in RUNNER_PARTS)
    imports = r"(?m)^ *from (agentrl|__future__)[^(\n]* import (\([^)]*\)|.*)$"
    return "".join([first, *(re.sub(imports, "", part) for part in others)])


def settings(
    limits: SandboxLimits,
    defences: frozenset[Defence],
    work: str = WORK,
    *,
    alone: bool = False,
    egress: int | str | None = None,
) -> str:
    """Return the runner's one argument.

    Args:
        limits: its limits.
        defences: those that stand.
        work: the folder where code starts.
        alone: whether no cgroup bounds it, so that limits of each process have to do.
        egress: the Unix socket that takes its way out, by descriptor or by path; see `egress.py`.

    """
    values = {
        "work": work,
        "egress": egress if Defence.NETWORK in defences else None,
        "hidden": Defence.RUNNER in defences,
        "sweep": Defence.SWEEP in defences,
        "cpu": Defence.CPU in defences,
        "file_bytes": limits.file_mb * 2**20 if Defence.FILE_SIZE in defences else None,
        "open_files": limits.open_files if Defence.OPEN_FILES in defences else None,
        "address_space": limits.memory_mb * 2**20 if alone and Defence.MEMORY in defences else None,
        "processes": limits.processes if alone and Defence.PROCESSES in defences else None,
    }
    return orjson.dumps(values).decode()


def python_command(
    python: str,
    limits: SandboxLimits,
    defences: frozenset[Defence],
    work: str = WORK,
    *,
    alone: bool = False,
    egress: int | str | None = None,
) -> list[str]:
    """Return the command that starts the runner: isolated from environment and user site, with UTF-8 everywhere."""
    argument = settings(limits, defences, work, alone=alone, egress=egress)
    return [python, "-I", "-X", "utf8", "-c", runner_source(), argument]


class RunnerSandbox(Sandbox):
    """Implements `Sandbox` over a link to a runner. A backend says how it is ended and how often memory ran out.

    Args:
        sandbox_id: unique on this machine.
        link: to its runner.
        limits: of calls that bring none of their own.
        defences: those that stand.
    """

    def __init__(self, sandbox_id: str, link: RunnerLink, limits: SandboxLimits, defences: frozenset[Defence]) -> None:
        self.id = sandbox_id
        self._link = link
        self._limits = limits
        self._defences = defences
        self._lock = asyncio.Lock()
        self._broken = ""
        self._closed: asyncio.Task[None] | None = None

    @abstractmethod
    def _oom_kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory. May be called after the end."""

    @abstractmethod
    async def _destroy(self) -> None:
        """End all its processes and remove what it left on the machine. Called once."""

    @abstractmethod
    async def _autopsy(self) -> str:
        """Return in words what is known of the end of a runner that does not answer."""

    @property
    def alive(self) -> bool:
        """Whether it can take another call."""
        return not self._broken and self._closed is None

    async def ready(self) -> None:
        """Wait until the runner answers.

        Raises:
            SandboxFailure: it does not; the sandbox is closed then.

        """
        try:
            await self._request({"op": "ping"}, READY_S)
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Job) -> Outcome:
        """Run a job; see `Sandbox.run`. A call that is cancelled ends the sandbox: its state is unknown then."""
        limits = self._limits
        output = limits.output_kb * 1024 if job.output_bytes is None else job.output_bytes
        wall = limits.wall_s if job.wall_s is None else job.wall_s
        request = {
            "op": "run",
            "code": job.code,
            "argv": list(job.argv),
            "stdin": base64.b64encode(job.stdin).decode(),
            "env": dict(job.env),
            "cwd": job.cwd,
            "wall_s": wall if Defence.WALL in self._defences else None,
            "cpu_s": limits.cpu_s if job.cpu_s is None else job.cpu_s,
            "output_bytes": output if Defence.OUTPUT in self._defences else None,
            "stateful": job.stateful,
        }
        async with self._lock:
            kills = self._oom_kills()
            try:
                reply = await self._request(request, wall + GRACE_S)
            except SandboxFailure:
                if self._oom_kills() > kills:
                    detail = "out of memory; the sandbox was ended, its files are lost"
                    return Outcome(ToolStatus.OUT_OF_MEMORY, "", "", None, 0.0, detail)
                raise
            return _outcome(reply, request, oom=self._oom_kills() > kills)

    async def write_file(self, path: str, content: bytes) -> None:
        """Write a file; see `Sandbox.write_file`."""
        async with self._lock:
            for start in range(0, max(1, len(content)), PART):
                part = base64.b64encode(content[start : start + PART]).decode()
                await self._file({"op": "write", "path": path, "append": start > 0, "stdin": part})

    async def read_file(self, path: str, max_bytes: int = 2**20) -> bytes:
        """Return a file's content; see `Sandbox.read_file`."""
        content = b""
        async with self._lock:
            while len(content) <= max_bytes:
                size = min(PART, max_bytes + 1 - len(content))
                request = {"op": "read", "path": path, "offset": len(content), "size": size, "stdin": ""}
                part = base64.b64decode((await self._file(request))["content"])
                content += part
                if len(part) < size:
                    return content
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", path)

    async def _file(self, request: dict[str, Any]) -> dict[str, Any]:
        kills = self._oom_kills()
        try:
            reply = await self._request(request, GRACE_S)
        except SandboxFailure:
            if self._oom_kills() > kills:
                raise OSError(errno.ENOMEM, "out of memory; the sandbox was ended", request["path"]) from None
            raise
        if "errno" in reply:
            raise OSError(reply["errno"], reply["error"], request["path"])
        return reply

    async def close(self) -> None:
        """End it; a second call waits for the first. Whoever waits for a call gets `SandboxFailure`."""
        if self._closed is None:
            self._closed = asyncio.create_task(self._end(), name=f"close-{self.id}")
        await asyncio.shield(self._closed)

    async def _end(self) -> None:
        self._broken = self._broken or "it was closed"
        self._link.close()
        await self._destroy()

    async def _request(self, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if not self.alive:
            raise SandboxFailure(f"sandbox {self.id} is gone: {self._broken or 'it was closed'}")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._link.request(fields)
        except TimeoutError:
            self._broken = f"its runner did not answer in {timeout_s:g} s"
        except LinkError as error:
            self._broken = self._broken or f"its runner is gone ({await self._autopsy() or error})"
        except BaseException:
            self._broken = "a call was given up"
            raise
        raise SandboxFailure(f"sandbox {self.id}: {self._broken}")


def _outcome(reply: dict[str, Any], request: dict[str, Any], *, oom: bool) -> Outcome:
    if "errno" in reply:  # the runner could not even start the call: what earlier calls left fills memory or processes
        status = ToolStatus.OUT_OF_MEMORY if reply["errno"] == errno.ENOMEM or oom else ToolStatus.ERROR
        return Outcome(status, "", "", None, 0.0, f"the call could not be started: {reply['error']}")
    code: int | None = reply["exit_code"]
    status, detail = ToolStatus.OK, ""
    if oom:
        status, detail = ToolStatus.OUT_OF_MEMORY, "out of memory"
    elif reply["why"] == "wall":
        status, detail = ToolStatus.TIMEOUT, f"timed out after {request['wall_s']:g} s"
    elif reply["why"] == "output":
        status, detail = ToolStatus.OUTPUT_CUT, f"ended after printing {request['output_bytes']} bytes"
    elif code == -signal.SIGXCPU or (code == -signal.SIGKILL and reply["cpu_s"] >= request["cpu_s"]):
        status, detail = ToolStatus.TIMEOUT, "used up its CPU time"
    elif code is None or code < 0:
        status, detail = ToolStatus.KILLED, f"killed by {_signal_name(code)}"
    elif code:
        status = ToolStatus.ERROR
    if reply.get("variables_lost"):
        detail += "; variables are lost" if detail else "the process ended, variables are lost"
    return Outcome(status, reply["stdout"], reply["stderr"], code, reply["seconds"], detail)


def _signal_name(code: int | None) -> str:
    try:
        return signal.Signals(-(code or 0)).name
    except ValueError:
        return f"signal {-(code or 0)}"
