"""An agent program as a process of this machine, with its folder; and what every program gets."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from agentrl.clients.chat_messages import Json, content_to_wire
from agentrl.config.agent import ProgramConfig, command_words
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import AgentProgramError
from agentrl.core.task import Task
from agentrl.core.types import Message, json_state
from agentrl.gateway import supervisor
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.gateway.variables import session_variables

_INHERITED = (
    "PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "USER", "SHELL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables of this process that a program gets. Others may be secrets, or differ from run to run."""
_VARIABLE_BYTES = 100_000
"""Bytes of the longest prompt in a variable; the kernel's limit is 128 KiB."""
ANSWER_BYTES = 2**20
"""Bytes of a final answer; what follows is left out."""
OUTPUT_LINES = 20
"""Lines of a program's output in messages."""


class RunningProgram(Protocol):
    """A program that has been started."""

    cwd: Path | None
    """Its folder on this machine, with its files once it has ended; None: they stay elsewhere."""
    limit_s: float | None = None
    """Seconds, by the clock of the episode, that its task gives it; None: no limit. It is graded then as it is."""
    ended: asyncio.Future[str]
    """What is wrong with how it ended, in words; empty if nothing is. Nothing of it runs any more then."""

    async def kill(self) -> None:
        """End the program with all that it has started, and wait for it."""
        ...

    async def close(self) -> None:
        """Remove its folder."""
        ...

    def output(self) -> str:
        """Return what it has written to its standard output, up to `ANSWER_BYTES`."""
        ...

    def read_file(self, name: str) -> str:
        """Return the text of a file in its folder, up to `ANSWER_BYTES`, once it has ended; empty if there is none."""
        return "" if self.cwd is None else read_start(self.cwd / name)

    def output_end(self) -> str:
        """Return the last lines of its output, for messages."""
        ...


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """What a program reads."""

    prompt: str
    """The text of ``AGENTRL_PROMPT`` and of the standard input."""
    task_json: str
    """The file ``AGENTRL_TASK``."""

    @classmethod
    def from_task(cls, config: ProgramConfig, task: Task) -> ProgramInput:
        """Return what a program reads that plays whole episodes."""
        return cls(program_prompt(config, task.question), task_json(task, task.prompt))


def program_variables(
    config: ProgramConfig, program_input: ProgramInput, url: str, key: str, task_file: str
) -> dict[str, str]:
    """Return the variables with which a program finds policy and task.

    Args:
        config: what it is started with.
        program_input: what it reads.
        url: address of the gateway.
        key: of the session.
        task_file: where the program reads `ProgramInput.task_json`.
    """
    model = next(iter(config.models), config.model)
    variables = {**session_variables(url, key, model), "AGENTRL_TASK": task_file}
    if config.models:
        urls = {agent: f"{url}/s/{key}/agents/{agent}/v1" for agent in config.models.values()}
        variables["AGENTRL_AGENTS"] = json.dumps(urls)
    if len(program_input.prompt.encode()) <= _VARIABLE_BYTES:
        variables["AGENTRL_PROMPT"] = program_input.prompt
    return variables | config.env


def program_prompt(config: ProgramConfig, text: str) -> str:
    """Return the prompt of a program, with the text of its task."""
    return config.prompt.replace("{prompt}", text)


def task_json(task: Task, messages: Iterable[Message]) -> str:
    """Return a task as the program may read it: without the answer.

    Args:
        task: of the episode.
        messages: those that it has read.
    """
    fields = {"id": task.id, "prompt": plain_messages(messages), "metadata": json_state(task.metadata)}
    return json.dumps(fields, ensure_ascii=False)


def plain_messages(messages: Iterable[Message]) -> list[Json]:
    """Return messages as roles and texts; with images contents are parts, as in OpenAI's chat completions."""
    return [{"role": message.role, "content": content_to_wire(message)} for message in messages]


def read_start(file: Path) -> str:
    """Return the text of a file up to `ANSWER_BYTES`; empty if it is no file, such as a link to a device or a pipe."""
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return stream.read(ANSWER_BYTES).decode(errors="replace")


def describe_exit(code: int) -> str:
    """Return what is wrong with an exit status, in words; empty for 0."""
    if code >= 0:
        return f"ended with exit status {code}" if code else ""
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ProgramProcess(RunningProgram):
    """A running agent program, its folder, and what supervises it. Made by `start`."""

    def __init__(self, child: ChildProcess, folder: Path, cwd: Path, status_fd: int) -> None:
        self.cwd = cwd
        self.ended = asyncio.get_running_loop().create_future()
        self._child, self._folder, self._status_fd = child, folder, status_fd
        asyncio.get_running_loop().add_reader(status_fd, self._read_status)

    @classmethod
    async def start(cls, config: ProgramConfig, program_input: ProgramInput, url: str, key: str) -> ProgramProcess:
        """Make the folder and start the program.

        Args:
            config: what is started, and with what.
            program_input: what it reads.
            url: address of the gateway.
            key: of the session.

        Raises:
            AgentProgramError: no process can be started.
        """
        folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        cwd = folder / "work" if config.cwd is None else config.cwd.resolve()
        reading, writing = os.pipe()
        try:
            task_file = folder / "task.json"
            task_file.write_text(program_input.task_json)
            variables = program_variables(config, program_input, url, key, str(task_file))
            child = await asyncio.to_thread(_start, config, program_input.prompt, variables, folder, cwd, writing)
        except BaseException:
            os.close(reading)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(writing)
        return cls(child, folder, cwd, reading)

    def _read_status(self) -> None:
        text = os.read(self._status_fd, 64)
        asyncio.get_running_loop().remove_reader(self._status_fd)
        os.close(self._status_fd)
        if not text:  # the supervisor itself has been killed
            _kill_strays(self._folder)
        self.ended.set_result(describe_exit(int(text) if text else -signal.SIGKILL))

    @override
    async def kill(self) -> None:
        if not self.ended.done():
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGUSR1)
            await asyncio.wait({self.ended})

    @override
    async def close(self) -> None:
        await self.kill()
        await asyncio.to_thread(self._child.stop)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @override
    def output(self) -> str:
        return read_start(self._folder / "output.txt")

    @override
    def output_end(self) -> str:
        file = self._folder / "output.txt"
        lines = file.read_text(errors="replace").splitlines()[-OUTPUT_LINES:] if file.is_file() else []
        text = "\n".join([*lines, self._child.log_tail(OUTPUT_LINES)]).strip()
        return f" The end of its output:\n{text}" if text else ""


def _kill_strays(folder: Path) -> None:
    """Kill the processes that have ``folder`` in their environment."""
    marker, killed = b"=" + os.fsencode(folder) + b"/", set[str]()
    while strays := _with_environment(marker) - killed:
        killed |= strays
        for name in strays:
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGKILL)


def _with_environment(text: bytes) -> set[str]:
    """Return the ids of this user's processes that have ``text`` in their environment."""
    names = set[str]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if text in Path("/proc", name, "environ").read_bytes():
                names.add(name)
    return names


def _start(
    config: ProgramConfig, prompt: str, variables: Mapping[str, str], folder: Path, cwd: Path, status_fd: int
) -> ChildProcess:
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    if config.cwd is None:
        if config.files is None:
            cwd.mkdir()
        else:
            shutil.copytree(config.files, cwd, symlinks=True)
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    env |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "NO_PROXY": "127.0.0.1,localhost,::1"}
    if config.harness is None:
        command = command_words(config.command or "", config.key)
    else:
        harness, values = HARNESSES[config.harness], {**env, **variables, "AGENTRL_PROMPT": prompt}
        command = harness.words(harness.find(config.env.get("PATH")), values, str(harness.script))
        env |= harness.env
        for name, text in harness.files(values).items():
            file = folder / "home" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    (folder / "prompt.txt").write_text(prompt)
    start = {"command": command, "cwd": str(cwd), "env": {**env, **variables}}
    (folder / "start.json").write_text(json.dumps(start))
    return ChildProcess.start(
        [sys.executable, "-I", "-S", supervisor.__file__, str(folder), str(status_fd)],
        log=folder / "output.log",
        name="the agent program",
        error=AgentProgramError,
        pass_fds=(status_fd,),
    )
