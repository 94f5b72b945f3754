"""The backend ``unsafe_subprocess``: the runner as a plain process of this user, without isolation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import uuid
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import ClassVar

from agentrl.core.errors import SandboxFailure
from agentrl.sandbox.runner_command import python_command
from agentrl.sandbox.runner_sandbox import RunnerBackend, RunnerSandbox, open_pipes


class UnsafeSandbox(RunnerSandbox):
    """A runner in a process group and folder of the host, not isolated."""

    process: Process
    folder: Path

    def _oom_kills(self) -> int:
        return 0

    async def _destroy(self) -> None:
        # The runner ends itself, since its pipe is closed; this also ends a call in progress.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def _describe_end(self) -> str:
        code = self.process.returncode
        return "" if code is None else f"exit status {code}"


class UnsafeBackend(RunnerBackend[UnsafeSandbox]):
    """Runs code with the rights of this user; only wall time, output and per-process limits hold."""

    name: ClassVar[str] = "unsafe_subprocess"
    isolated: ClassVar[bool] = False

    async def start(self) -> None:
        """Do nothing: it needs nothing."""

    async def _start_sandbox(self, session_id: str) -> UnsafeSandbox:
        folder = Path(tempfile.mkdtemp(prefix="agentrl-unsafe-"))
        command = python_command(self.config.python, self.config.limits, self.defences, str(folder))
        # Not asyncio's PIPE, which may be a socket.
        runner_stdin, to_runner = os.pipe()
        from_runner, runner_stdout = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=runner_stdin, stdout=runner_stdout, stderr=DEVNULL, cwd=folder, start_new_session=True
            )
        except OSError as error:
            os.close(to_runner)
            os.close(from_runner)
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxFailure(f"sandbox.python={self.config.python} does not start: {error}") from error
        finally:
            os.close(runner_stdin)
            os.close(runner_stdout)
        reader, writer = await open_pipes(from_runner, to_runner)
        name = f"unsafe-{uuid.uuid4().hex[:12]}"
        sandbox = UnsafeSandbox(name, reader, writer, self.config.limits, self.defences)
        sandbox.process, sandbox.folder = process, folder
        return sandbox

    async def close(self) -> None:
        """Close all open sandboxes."""
        await self._close_sandboxes()
