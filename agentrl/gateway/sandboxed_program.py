"""Agent programs in sandboxes: one sandbox an episode, from which only the gateway can be reached."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import shutil
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from typing_extensions import override

from agentrl.config.agent import ProgramConfig, command_words
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import AgentProgramError, ConfigError, SandboxFailure
from agentrl.core.types import ToolStatus
from agentrl.gateway.harnesses.base import program_path
from agentrl.gateway.harnesses.recipes import HARNESSES, installed_harness
from agentrl.gateway.program_process import (
    ANSWER_BYTES,
    OUTPUT_LINES,
    ProgramInput,
    RunningProgram,
    describe_exit,
    program_variables,
)
from agentrl.sandbox.base import Job, Outcome, Sandbox, SandboxBackend
from agentrl.sandbox.canary.check import check_backend
from agentrl.sandbox.registry import backend_class, make_backend
from agentrl.sandbox.shown_folders import environment_folders, is_program

if TYPE_CHECKING:
    from agentrl.gateway.harnesses.installed import Installation, Program

GATEWAY_HOST = "127.0.0.2"
"""Where the gateway listens for sandboxes. Their own loopback is another, and programs use no proxy for 127.0.0.1."""
_PROGRAM_S = 86_400.0
"""Wall time of a program, seconds: the episode has its own limit."""
_CHECK_S = 60.0
"""Wall time in which a program prints its version in a sandbox."""
_PACK = '''
import base64, os, sys, tarfile

device = os.stat(".").st_dev

def own(member):
    """Leave out folders of the machine that are shown below the working directory."""
    return member if os.lstat(member.name).st_dev == device else None

class Output:
    unwritten = b""

    def write(self, data):
        data = self.unwritten + data
        size = len(data) // 3 * 3
        sys.stdout.write(base64.b64encode(data[:size]).decode())
        self.unwritten = data[size:]

output = Output()
with tarfile.open(fileobj=output, mode="w|") as archive:
    archive.add(".", filter=own)
sys.stdout.write(base64.b64encode(output.unwritten).decode())
'''
"""Python that prints the files of the working directory."""
_MAKE_EXECUTABLE = """
import os, sys

for name in sys.argv[1:]:
    os.chmod(name, os.stat(name).st_mode | 0o100)
"""
"""Python that makes files executable; those of a sandbox are written without permissions."""


def agent_sandbox(config: ProgramConfig, sandbox: SandboxConfig) -> SandboxConfig:
    """Return the ``sandbox`` section for agent programs: their backend, and what a harness needs.

    The files of a harness that is installed on this machine are shown, and limits that have their default are raised to those of
    its recipe.

    Args:
        config: of the program; it has a sandbox.
        sandbox: the ``sandbox`` section of the run.

    Raises:
        MissingError: the harness is not installed, or this machine lacks something that the sandbox needs.
        ConfigError: the harness is installed where code in the sandbox could read tasks and answers.
    """
    assert config.sandbox is not None, "it has a sandbox"
    backend = backend_class(config.sandbox)
    sandbox = sandbox.model_copy(update={"backend": config.sandbox})
    if config.harness is not None:
        harness = HARNESSES[config.harness]
        sandbox = sandbox.model_copy(update={"limits": harness.raise_limits(sandbox.limits)})
        if not backend.has_images:
            files = shown_files(installed_harness(config.harness, config.env.get("PATH"), config.key))
            check_files(config, files, harness.install)
            sandbox = sandbox.model_copy(update={"readonly": (*sandbox.readonly, *files)})
    backend.check(sandbox)
    return sandbox


def shown_files(installation: Installation) -> list[Path]:
    """Return the files and folders that a program needs, without those of the system and those in another one of them."""
    paths = sorted({Path(file) for file in installation["files"]})  # a folder comes before what is in it
    shown: list[Path] = []
    for path in paths:
        if not is_program(path) and not any(path.is_relative_to(folder) for folder in shown):
            shown.append(path)
    return shown


def check_files(config: ProgramConfig, files: list[Path], install: str) -> None:
    """Check that a program's files are not those of the run.

    Args:
        config: of the program; it has a harness.
        files: see `shown_files`.
        install: the command that installs it.

    Raises:
        ConfigError: they are in the run's own Python environment, or have it in them.
    """
    for file in files:
        for folder in environment_folders():
            if folder.is_relative_to(file.resolve()) or file.resolve().is_relative_to(folder):
                raise ConfigError(
                    f"{config.key}.harness={config.harness} is installed in this process's Python environment ({folder}), which "
                    "code in a sandbox must not see: it could read hidden tests and answers there. Make another environment for "
                    f"it (python3 -m venv /opt/agent; /opt/agent/bin/{install}), and set "
                    f"{config.key}.env.PATH=/opt/agent/bin:/usr/bin:/bin"
                )


class EpisodeSandboxes:
    """The sandbox backend of agent programs; it runs while an episode does.

    Args:
        config: of the program.
        sandbox: the ``sandbox`` section of the run; the gateway is added to its hosts.
    """

    def __init__(self, config: ProgramConfig, sandbox: SandboxConfig) -> None:
        self._config, self._sandbox = config, sandbox
        self._users = 0
        self._starting: asyncio.Task[SandboxBackend] | None = None
        self._program_sandbox: SandboxConfig | None = None
        """Once it is checked, the section of the programs' sandboxes; see `agent_sandbox`."""
        self._url = ""
        """Address of the gateway in a sandbox."""
        self._program: Program | None = None
        """Where the harness is installed in a sandbox."""

    @asynccontextmanager
    async def backend(self, url: str) -> AsyncIterator[SandboxBackend]:
        """Start the backend unless it runs, and yield it; the last of these contexts closes it.

        Args:
            url: address of the gateway.

        Raises:
            MissingError, ConfigError: the backend cannot be used on this machine, or has not the harness.
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
        gateway = urlsplit(url).netloc
        if self._program_sandbox is None:
            sandbox = await asyncio.to_thread(agent_sandbox, self._config, self._sandbox)
            # Not with the limits of a harness: attempts to exceed them would take much of this machine's memory.
            async with await self._make_backend(
                sandbox.model_copy(update={"limits": self._sandbox.limits}), gateway
            ) as backend:
                await check_backend(backend)
            if self._config.harness is not None:
                async with await self._make_backend(sandbox, gateway) as backend:
                    self._program = await self._find_program(self._config.harness, backend)
            self._program_sandbox = sandbox
        backend = await self._make_backend(self._program_sandbox, gateway)
        await backend.__aenter__()
        return backend

    async def _make_backend(self, sandbox: SandboxConfig, gateway: str) -> SandboxBackend:
        sandbox = sandbox.model_copy(update={"hosts": (*sandbox.hosts, gateway)})
        backend = await asyncio.to_thread(make_backend, sandbox)
        self._url = f"http://{backend.forward(gateway)}"
        return backend

    def _path(self, backend: SandboxBackend) -> dict[str, str]:
        """Return the folders of programs in a sandbox, as variables; none: those of its image."""
        path = self._config.env.get("PATH")
        return {} if path is None and backend.has_images else {"PATH": program_path(path)}

    async def _find_program(self, name: str, backend: SandboxBackend) -> Program:
        """Return where a harness is installed in a sandbox, in which it prints its version.

        Raises:
            MissingError: it is not installed there, or does not start.
        """
        key = self._config.key
        harness, where = HARNESSES[name], f"in the sandboxes of {key}.sandbox={backend.config.backend}"
        if backend.has_images:
            where += f" with sandbox.image={backend.config.image}"
        program = None if backend.has_images else harness.find(self._config.env.get("PATH"))
        async with await backend.open("harness") as sandbox:
            argv = (backend.config.python, *harness.query(program))
            env = {**self._path(backend), **harness.env}
            outcome = await sandbox.run(Job("harness", argv=argv, env=env, wall_s=_CHECK_S))
        if outcome.status is not ToolStatus.OK:
            raise SandboxFailure(f"{key}.harness={name} cannot be looked for: {outcome.stderr}{outcome.detail}")
        fault_hint = ". Limits are in sandbox.limits, further folders that it reads in sandbox.readonly"
        return harness.read_answer(outcome.stdout, f"{key}.harness={name}", where, fault_hint=fault_hint)

    async def start(
        self, backend: SandboxBackend, program_input: ProgramInput, name: str, key: str
    ) -> SandboxedProgram:
        """Open a sandbox, copy the files into it, and start the program.

        Args:
            backend: see `backend`.
            program_input: what the program reads.
            name: of the sandbox.
            key: of the session.

        Raises:
            SandboxFailure: the sandbox does not open.
            AgentProgramError: a file cannot be copied, such as for lack of space.
        """
        config = self._config
        home, prompt = f"/tmp/agentrl-{key[-8:]}", program_input.prompt
        task_file = f"{home}/task.json"
        env = program_variables(config, program_input, self._url, key, task_file)
        home_files = {task_file: program_input.task_json}
        if config.harness is None:
            words = command_words(config.command or "", config.key, resolve=False)
        else:
            harness, values = HARNESSES[config.harness], {**env, "HOME": home, "AGENTRL_PROMPT": prompt}
            words, harness_files = harness.place(self._program, values)
            home_files |= {f"{home}/{path}": text for path, text in harness_files.items()}
            env = {**self._path(backend), "HOME": home, **harness.env, **env}
        sandbox = await backend.open(name)
        try:
            for path, text in home_files.items():
                await sandbox.write_file(path, text.encode())
            if config.files is not None:
                await _copy_folder(config.files, sandbox, backend.config.python)
        except OSError as error:
            await sandbox.close()
            raise AgentProgramError(f"{config.key}.files={config.files} cannot be copied: {error}") from error
        except BaseException:
            await sandbox.close()
            raise
        job = Job("agent", argv=tuple(words), stdin=prompt.encode(), env=env, wall_s=_PROGRAM_S)
        return SandboxedProgram(sandbox, job, backend.config, None if backend.isolated else Path(home))


async def _copy_folder(folder: Path, sandbox: Sandbox, python: str) -> None:
    """Copy the files of a folder of this machine to the sandbox's, with the owner's right to execute them.

    Args:
        folder: on this machine.
        sandbox: of the episode.
        python: the interpreter in the sandbox.

    Raises:
        OSError: a file cannot be copied.
        SandboxFailure: the sandbox cannot be used.
    """
    executables = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            await sandbox.write_file(name, path.read_bytes())
            if path.stat().st_mode & stat.S_IXUSR:
                executables.append(name)
    if executables:
        argv = (python, "-I", "-c", _MAKE_EXECUTABLE, *executables)
        outcome = await sandbox.run(Job("executables", argv=argv, wall_s=_CHECK_S))
        if outcome.status is not ToolStatus.OK:
            raise SandboxFailure(f"{folder}: files cannot be made executable: {outcome.stderr}{outcome.detail}")


class SandboxedProgram(RunningProgram):
    """A program that runs in a sandbox. Its files are copied to a folder of this machine when it has ended."""

    def __init__(self, sandbox: Sandbox, job: Job, config: SandboxConfig, home: Path | None) -> None:
        self._home = home
        """The program's home on this machine; None if it is gone with the sandbox."""
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
        for folder in filter(None, (self._folder, self._home)):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

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
