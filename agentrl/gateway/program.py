"""Agent programs that play episodes: started once an episode, with the endpoints of the gateway in their environment."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from agentrl.config.agent import FILE, AgentConfig, ProgramConfig, command_words
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Rollout
from agentrl.episode.chat import Agent
from agentrl.episode.env_steps import AnswerScoring
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.tool_calls import ToolRunner
from agentrl.gateway.agent_loop import AgentLoop, describe_wait, late, time_left
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.harnesses.recipes import installed_harness
from agentrl.gateway.program_process import ProgramInput, ProgramProcess, RunningProgram, read_start
from agentrl.gateway.sandboxed_program import GATEWAY_HOST, EpisodeSandboxes, agent_sandbox
from agentrl.gateway.server import Gateway
from agentrl.obs.waiting import waiting
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.shown_folders import check_shown

_log = logging.getLogger(__name__)

FOLDER = "agent_folder"
"""Key of `Rollout.metadata` with the folder in which the program ran; a reward function finds its files there."""


def check_agent(config: ProgramConfig, sandbox: SandboxConfig, private_paths: Mapping[Path, str] | None = None) -> None:
    """Check what can be known of an agent program before it is started.

    Args:
        config: of the program.
        sandbox: the ``sandbox`` section of the run.
        private_paths: files and folders that a program in a sandbox must not read, each with a description.

    Raises:
        ConfigError: the program or a folder does not exist, or the sandbox would show what is private.
        MissingError: this machine lacks the harness, or something that the sandbox needs.
    """
    path, key = config.env.get("PATH"), config.key
    words = command_words(config.command, key) if config.command is not None else []
    if config.sandbox is not None:
        own_sandbox = agent_sandbox(config, sandbox)
        check_shown(own_sandbox, private_paths)
        if own_sandbox.limits != sandbox.limits:
            raised = [f"{key}={value}" for key, value in own_sandbox.limits if value != getattr(sandbox.limits, key)]
            _log.info("%s raises sandbox.limits of its sandboxes: %s", config.setting, ", ".join(raised))
    elif config.harness is not None:
        installed_harness(config.harness, path, key)
    elif shutil.which(words[0], path=path) is None:
        raise ConfigError(f"{key}.command={config.command}: there is no program {words[0]}")
    for name, folder in (("cwd", config.cwd), ("files", config.files)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{key}.{name}={folder} is no folder")


class ProgramLauncher:
    """Starts an agent program, in a sandbox if it has one, and has the gateway that it talks to.

    Args:
        config: of the program.
        sandbox: limits of its sandboxes, if it has any.
    """

    def __init__(self, config: ProgramConfig, sandbox: SandboxConfig) -> None:
        self.config = config
        """Of the program."""
        self._sandboxes: EpisodeSandboxes | None = None
        if config.sandbox is not None:
            self._sandboxes = EpisodeSandboxes(config, sandbox)
        self.gateway = Gateway(LOOPBACK if self._sandboxes is None else GATEWAY_HOST)
        """Where programs request their turns."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Keep the gateway, and the backend of the sandboxes, until the end of the last of these contexts.

        Raises:
            MissingError, ConfigError: the backend of the sandboxes cannot be used on this machine.
        """
        async with self._backend():
            yield

    @asynccontextmanager
    async def running(
        self, program_input: ProgramInput, name: str, key: str, tools: ToolRunner
    ) -> AsyncIterator[RunningProgram]:
        """Start the program, and yield it; at the end of the context nothing of it runs any more.

        Args:
            program_input: what it reads.
            name: of its sandbox.
            key: of its session.
            tools: of the episode; its folder is removed with their sessions.

        Raises:
            AgentProgramError: no process can be started.
            SandboxFailure: its sandbox does not open.
        """
        async with self._backend() as (url, backend):
            if self._sandboxes is None or backend is None:
                program: RunningProgram = await ProgramProcess.start(self.config, program_input, url, key)
            else:
                program = await self._sandboxes.start(backend, program_input, name, key)
            tools.on_close(program.close)
            try:
                yield program
            finally:
                await program.kill()

    @asynccontextmanager
    async def _backend(self) -> AsyncIterator[tuple[str, SandboxBackend | None]]:
        """Serve, and yield the address of the gateway, and the backend of the sandboxes if there is one."""
        async with self.gateway.serving() as url:
            if self._sandboxes is None:
                yield url, None
            else:
                async with self._sandboxes.backend(url) as backend:
                    yield url, backend

    def final_answer(self, program: RunningProgram, last_message: str) -> str:
        """Return the final answer of a program that has ended, as ``answer`` says.

        Args:
            program: that has ended.
            last_message: the policy's last turn.
        """
        kind = self.config.answer
        if kind == "message":
            return last_message
        return program.output() if kind == "output" else read_start(program.cwd / kind.removeprefix(FILE))


async def wait_for_end(
    program: RunningProgram, sessions: AgentSessions, clock: EpisodeClock, move: asyncio.Future[str] | None = None
) -> str:
    """Wait for the end of a program, of its time, or for a failure; return what is wrong with it, or nothing.

    Args:
        program: that runs.
        sessions: of the program.
        clock: of the episode.
        move: in whose end the wait ends, too.
    """
    ends: set[asyncio.Future[Any]] = {program.ended, sessions.failure}
    if move is not None:
        ends.add(move)
    while time_left(clock) > 0:
        # The clock stands still while engines sample, so that there may be time left then.
        timeout_s = max(0.05, time_left(clock))
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if move is not None and move.done():
            return ""
        if program.ended.done():
            return "" if sessions.at_limit else program.ended.result()
        if sessions.failure.done():
            return "was ended"
    return late(clock, "end" if move is None else "move")


class AgentProgram(AgentLoop):
    """Plays episodes with an agent program; a `agentrl.episode.custom_loop.Generate` function.

    Args:
        config: of the program.
        sandbox: limits of its sandboxes, if it has any.
    """

    def __init__(self, config: AgentConfig, sandbox: SandboxConfig) -> None:
        super().__init__(config)
        self._launcher = ProgramLauncher(config, sandbox)

    @override
    async def run(self, task: Task, agent: Agent, scoring: AnswerScoring | None) -> list[Rollout]:
        sessions, launcher = AgentSessions.open(agent, self.config), self._launcher
        program_input = ProgramInput.from_task(self.config, task)
        async with (
            launcher.serving(),
            launcher.gateway.open(sessions) as key,
            launcher.running(program_input, agent.episode_id, key, agent.tools) as program,
        ):
            with waiting("agent", "program", lambda: describe_wait(sessions, agent.clock)):
                sessions.fault = await wait_for_end(program, sessions, agent.clock)
        self.check(sessions, program.output_end())
        answer = launcher.final_answer(program, sessions.last_message())
        return await self.finish(sessions, agent, scoring, answer, {FOLDER: str(program.cwd)})
