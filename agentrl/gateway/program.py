"""Agent programs that play episodes: started once an episode, with the endpoints of the gateway in their environment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.config.agent import AgentConfig, command_words
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import AgentProgramError, ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Rollout, json_state
from agentrl.episode.chat import Agent
from agentrl.episode.limits import EpisodeClock
from agentrl.gateway import supervisor
from agentrl.gateway.agent_session import Session
from agentrl.gateway.server import Gateway

KEY = "rollout.agent"
FOLDER = "agent_folder"
"""Key of `Rollout.metadata` with the folder in which the program ran; a reward function finds its files there."""

_INHERITED = (
    "PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "USER", "SHELL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS",
)  # fmt: skip
"""Variables of this process that a program gets. Others may be secrets, or differ from run to run."""
_VARIABLE_BYTES = 100_000
"""Bytes of the longest prompt in a variable; the kernel's limit is 128 KiB."""
_SHARE_OF_GRACE = 0.05
"""Share of ``rollout.max_seconds`` that a program has to end after the time limit."""


def check_agent(config: AgentConfig) -> None:
    """Check what can be known of an agent program before it is started.

    Raises:
        ConfigError: the program or a folder does not exist.
    """
    if config.command is None:
        return
    name = command_words(config.command)[0]
    if shutil.which(name, path=config.env.get("PATH")) is None:
        raise ConfigError(f"{KEY}.command={config.command}: there is no program {name}")
    for key, folder in (("cwd", config.cwd), ("files", config.files)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{KEY}.{key}={folder} is no folder")


class AgentProgram:
    """Plays episodes with an agent program; a `agentrl.episode.custom_loop.Generate` function."""

    def __init__(self, config: AgentConfig) -> None:
        assert config.command is not None, "there is a program"
        self._config = config
        self._command = command_words(config.command)
        self._gateway = Gateway()

    async def __call__(self, task: Task, agent: Agent) -> Rollout:
        """Run the program and return the rollout of what it sampled.

        Raises:
            AgentProgramError: it failed, did not end in time, or sent no request.
            EpisodeError: the engine failed, or the task's first prompt is too long.
        """
        agent.clock.raise_nothing()  # an end at the limit is a failure of the program, which has a message
        async with self._gateway.serving() as url, self._gateway.session(agent, self._config.model) as (key, session):
            session.may_reward = self._config.reward == "session"
            process = await ProgramProcess.start(self._command, self._config, task, _endpoints(url, key))
            agent.tools.on_close(process.close)
            try:
                fault = await self._wait(process, session, agent.clock)
            finally:
                await process.kill()
        if session.failure.done():
            raise session.failure.result()
        if fault or not session.turns:
            refused = f" Its last refused request: {session.refused}" if session.refused else ""
            fault = fault or "ended without a turn of the policy"
            raise AgentProgramError(f"{KEY}.command={self._config.command}: it {fault}.{refused}{process.output_end()}")
        rollout = session.rollout()
        rollout.metadata[FOLDER] = str(process.cwd)
        return rollout

    async def _wait(self, process: ProgramProcess, session: Session, clock: EpisodeClock) -> str:
        """Wait for the end of the program or of its time; return what is wrong with it, or nothing."""
        grace = _SHARE_OF_GRACE * clock.seconds
        while clock.seconds_left > -grace:
            # The clock stands still while engines sample, so that there may be time left then.
            ends: set[asyncio.Future[Any]] = {process.exit_code, session.failure}
            timeout_s = max(0.05, clock.seconds_left + grace)
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if process.exit_code.done():
                code = process.exit_code.result()
                if code == 0 or session.stop_reason is not None:
                    return ""
                return f"ended with exit status {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
            if session.failure.done():
                return "was ended"
        return f"did not end within rollout.max_seconds={clock.seconds:g}"


class ProgramProcess:
    """A running agent program, its folder, and what supervises it. Made by `start`."""

    def __init__(self, child: ChildProcess, folder: Path, cwd: Path, status_fd: int) -> None:
        self.cwd = cwd
        """Where the program runs."""
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Exit status of the program, negative for a signal, once nothing of it runs any more."""
        self._child, self._folder, self._status_fd = child, folder, status_fd
        asyncio.get_running_loop().add_reader(status_fd, self._read_status)

    @classmethod
    async def start(
        cls, command: Sequence[str], config: AgentConfig, task: Task, endpoints: Mapping[str, str]
    ) -> ProgramProcess:
        """Make the folder and start the program.

        Args:
            command: its words.
            config: what else it is started with.
            task: of the episode.
            endpoints: variables with addresses and keys.

        Raises:
            AgentProgramError: no process can be started.
        """
        folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        cwd = folder / "work" if config.cwd is None else config.cwd.resolve()
        reading, writing = os.pipe()
        try:
            child = await asyncio.to_thread(_start, command, config, task, endpoints, folder, cwd, writing)
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
        # Without a status the supervisor itself has been killed.
        self.exit_code.set_result(int(text) if text else -signal.SIGKILL)

    async def kill(self) -> None:
        """End the program with all processes that it has started, and wait until they have ended."""
        if not self.exit_code.done():
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGUSR1)
            await asyncio.wait({self.exit_code})

    async def close(self) -> None:
        """Remove the folder."""
        await self.kill()
        await asyncio.to_thread(self._child.stop)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def output_end(self) -> str:
        """Return the last lines of the program's output, for messages."""
        text = self._child.log_tail().strip()
        return f" The end of its output:\n{text}" if text else ""


def _start(
    command: Sequence[str],
    config: AgentConfig,
    task: Task,
    endpoints: Mapping[str, str],
    folder: Path,
    cwd: Path,
    status_fd: int,
) -> ChildProcess:
    for name in ("home", "tmp"):
        (folder / name).mkdir()
    if config.cwd is None:
        if config.files is None:
            cwd.mkdir()
        else:
            shutil.copytree(config.files, cwd, symlinks=True)
    task_file = folder / "task.json"
    task_file.write_text(json.dumps(_task_json(task), ensure_ascii=False))
    prompt = config.prompt.replace("{prompt}", task.question)
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    env |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "NO_PROXY": "127.0.0.1,localhost,::1"}
    env |= {**endpoints, "OPENAI_MODEL": config.model, "ANTHROPIC_MODEL": config.model, "AGENTRL_TASK": str(task_file)}
    if len(prompt.encode()) <= _VARIABLE_BYTES:
        env["AGENTRL_PROMPT"] = prompt
    start = {"command": list(command), "cwd": str(cwd), "env": env | config.env}
    (folder / "start.json").write_text(json.dumps(start))
    return ChildProcess.start(
        [sys.executable, "-I", "-S", supervisor.__file__, str(folder), str(status_fd)],
        log=folder / "output.log",
        name="the agent program",
        error=AgentProgramError,
        pass_fds=(status_fd,),
    )


def _endpoints(url: str, key: str) -> dict[str, str]:
    """Return the variables by which programs find the policy."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_AUTH_TOKEN": key,
        "AGENTRL_SESSION_URL": f"{url}/s/{key}/v1",
    }


def _task_json(task: Task) -> dict[str, object]:
    """Return a task as the program may read it: without the answer."""
    prompt = [{"role": message.role, "content": message.content} for message in task.prompt]
    return {"id": task.id, "prompt": prompt, "metadata": json_state(task.metadata)}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
