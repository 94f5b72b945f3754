"""Agent programs in sandboxes: one sandbox an episode, from which only the gateway can be reached."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import shutil
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from typing_extensions import override

from agentrl.config.agent import AgentConfig, command_words
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import AgentProgramError, SandboxFailure
from agentrl.core.task import Task
from agentrl.core.types import ToolStatus
from agentrl.gateway.program_process import (
    ANSWER_BYTES,
    OUTPUT_LINES,
    RunningProgram,
    describe_exit,
    program_variables,
    task_json,
)
from agentrl.sandbox.base import Job, Outcome, Sandbox, SandboxBackend
from agentrl.sandbox.canary.check import check_backend
from agentrl.sandbox.registry import make_backend

GATEWAY_HOST = "127.0.0.2"
"""Where the gateway listens for sandboxes. Their own loopback is another, and programs use no proxy for 127.0.0.1."""
_PROGRAM_S = 86_400.0
"""Wall time of a program, seconds: the episode has its own limit."""
_PACK = """
import base64, sys, tarfile

class Output:
    unwritten = b""

    def write(self, data):
        data = self.unwritten + data
        size = len(data) // 3 * 3
        sys.stdout.write(base64.b64encode(data[:size]).decode())
        self.unwritten = data[size:]

output = Output()
with tarfile.open(fileobj=output, mode="w|") as archive:
    archive.add(".")
sys.stdout.write(base64.b64encode(output.unwritten).decode())
"""
"""Python that prints the files of the working directory."""


class EpisodeSandboxes:
    """The sandbox backend of agent programs; it runs while an episode does.

    Args:
        config: of the program.
        sandbox: of the sandboxes; the gateway is added to their hosts.
    """

    def __init__(self, config: AgentConfig, sandbox: SandboxConfig) -> None:
        self._config, self._sandbox = config, sandbox
        self._users = 0
        self._starting: asyncio.Task[SandboxBackend] | None = None
        self._is_checked = False

    @asynccontextmanager
    async def backend(self, url: str) -> AsyncIterator[SandboxBackend]:
        """Start the backend unless it runs, and yield it; the last of these contexts closes it.

        Args:
            url: address of the gateway.

        Raises:
            MissingError, ConfigError: the backend cannot be used on this machine.
        """
        self._users += 1
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_backend(url))
        starting = self._starting
        try:
            yield await asyncio.shield(starting)
        finally:
            self._users -= 1
            if not self._users:
                self._starting = None
                with suppress(Exception):  # what waits for it has the error
                    await (await starting).close()

    async def _start_backend(self, url: str) -> SandboxBackend:
        hosts = (*self._sandbox.hosts, urlsplit(url).netloc)
        backend = make_backend(self._sandbox.model_copy(update={"hosts": hosts}))
        await backend.__aenter__()
        try:
            if not self._is_checked:
                await check_backend(backend)
                self._is_checked = True
        except BaseException:
            await backend.close()
            raise
        return backend

    async def start(self, backend: SandboxBackend, task: Task, episode: str, url: str, key: str) -> SandboxedProgram:
        """Open a sandbox, copy the files into it, and start the program.

        Raises:
            SandboxFailure: the sandbox does not open.
            AgentProgramError: a file cannot be copied, such as for lack of space.
        """
        sandbox, task_file = await backend.open(episode), f"/tmp/task-{key[-8:]}.json"
        try:
            await sandbox.write_file(task_file, task_json(task).encode())
            folder = self._config.files
            for path in sorted(folder.rglob("*")) if folder is not None else ():
                if path.is_file():
                    await sandbox.write_file(str(path.relative_to(folder or "")), path.read_bytes())
        except OSError as error:
            await sandbox.close()
            raise AgentProgramError(f"rollout.agent.files={self._config.files} cannot be copied: {error}") from error
        except BaseException:
            await sandbox.close()
            raise
        variables = program_variables(self._config, task, url, key, task_file)
        words = command_words(self._config.command or "", resolve=False)
        job = Job("agent", argv=tuple(words), env=variables, wall_s=_PROGRAM_S)
        return SandboxedProgram(sandbox, job, self._sandbox)


class SandboxedProgram(RunningProgram):
    """A program that runs in a sandbox. Its files are copied to a folder of this machine when it has ended."""

    def __init__(self, sandbox: Sandbox, job: Job, config: SandboxConfig) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        self.cwd = self._folder / "work"
        self.cwd.mkdir()
        self.ended = asyncio.get_running_loop().create_future()
        self._sandbox, self._config = sandbox, config
        self._outcome: Outcome | None = None
        self._running = asyncio.create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        try:
            self._outcome = outcome = await self._sandbox.run(job)
            await self._copy_files()
        except asyncio.CancelledError:
            self.ended.set_result("was ended")
        except SandboxFailure as error:
            self.ended.set_exception(error)
        else:
            limit = f"was ended by a limit of its sandbox: {outcome.detail or outcome.status.value}"
            self.ended.set_result(limit if outcome.exit_code is None else describe_exit(outcome.exit_code))

    async def _copy_files(self) -> None:
        """Copy the working directory to this machine.

        Raises:
            SandboxFailure: it cannot be read.
        """
        size = 2 * self._config.limits.disk_mb * 2**20
        argv = (self._config.python, "-I", "-c", _PACK)
        outcome = await self._sandbox.run(Job("files", argv=argv, wall_s=60.0, output_bytes=size))
        try:
            if outcome.status is not ToolStatus.OK:
                raise SandboxFailure(
                    f"the files of the agent program cannot be read: {outcome.stderr[-500:]}{outcome.detail}"
                )
            await asyncio.to_thread(self._unpack, outcome.stdout)
        except (tarfile.TarError, binascii.Error, OSError) as error:
            raise SandboxFailure(f"the files of the agent program cannot be read: {error}") from error

    def _unpack(self, text: str) -> None:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text, validate=True))) as archive:
            # Links and devices could lead out of the folder: a reward function reads what is in it.
            files = [member for member in archive.getmembers() if member.isfile() or member.isdir()]
            archive.extractall(self.cwd, files, filter="data")

    @override
    async def kill(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        if not self.ended.done():
            self.ended.set_result("was ended")
        await self._sandbox.close()

    @override
    async def close(self) -> None:
        await self.kill()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @override
    def output(self) -> str:
        text = "" if self._outcome is None else self._outcome.stdout
        return text.encode(errors="replace")[:ANSWER_BYTES].decode(errors="replace")

    @override
    def output_end(self) -> str:
        if self._outcome is None:
            return ""
        text = "\n".join((self._outcome.stdout + self._outcome.stderr).splitlines()[-OUTPUT_LINES:]).strip()
        return f" The end of its output:\n{text}" if text else ""
