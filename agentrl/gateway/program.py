"""Agent programs that play episodes: started once an episode, with the endpoints of the gateway in their environment."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from agentrl.config.agent import CONTAINER, FILE, AgentConfig, ProgramConfig, command_words
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
from agentrl.gateway.program_process import ProgramInput, ProgramProcess, RunningProgram
from agentrl.gateway.sandboxed_program import GATEWAY_HOST, EpisodeSandboxes, agent_sandbox
from agentrl.gateway.server import Gateway
from agentrl.obs.waiting import waiting
from agentrl.sandbox.base import SandboxBackend
from agentrl.sandbox.shown_folders import check_shown

if TYPE_CHECKING:
    from agentrl.gateway.machine_program import MachinePrograms

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
    for name, folder in (("cwd", config.cwd), ("files", config.files)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{config.key}.{name}={folder} is no folder")
    path, key = config.env.get("PATH"), config.key
    words = command_words(config.command, key) if config.command is not None else []
    if config.sandbox == CONTAINER:
        return  # the image of each task has the program
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


class ProgramLauncher:
    """Starts an agent program, in a sandbox if it has one, and has the gateway that it talks to.

    Args:
        config: of the program.
        sandbox: limits of its sandboxes, if it has any.
    """

    def __init__(self, config: ProgramConfig, sandbox: SandboxConfig) -> None:
        self.config = config
        """Configuration of the program."""
        self._sandboxes: EpisodeSandboxes | None = None
        self.in_machine = config.sandbox == CONTAINER
        """Whether the program works in the machine of its task."""
        if config.sandbox is not None and not self.in_machine:
            self._sandboxes = EpisodeSandboxes(config, sandbox)
        self.gateway = Gateway(LOOPBACK if self._sandboxes is None else GATEWAY_HOST)
        """Where programs request their turns."""
        self._machines: MachinePrograms | None = None
        if self.in_machine:
            from agentrl.gateway.machine_program import MachinePrograms  # needs the package docker

            self._machines = MachinePrograms(config, self.gateway)

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
        self,
        program_input: ProgramInput,
        name: str,
        key: str,
        tools: ToolRunner,
        machine: Mapping[str, object] | None = None,
    ) -> AsyncIterator[RunningProgram]:
        """Start the program, and yield it; at the end of the context nothing of it runs any more.

        Args:
            program_input: what it reads.
            name: of its sandbox.
            key: of its session.
            tools: of the episode; its folder is removed with their sessions.
            machine: access to the machine of the task, if it works there.

        Raises:
            AgentProgramError: no process can be started.
            SandboxFailure: its sandbox does not open.
            MissingError: the machine has no such program.
        """
        if self._machines is not None:
            async with self._machines.running(machine, program_input, key) as machine_program:
                yield machine_program
            return
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
        return program.output() if kind == "output" else program.read_file(kind.removeprefix(FILE))


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
    at_limit = -math.inf if program.limit_s is None else clock.seconds_left - program.limit_s
    while time_left(clock) > 0:
        if clock.seconds_left <= at_limit:
            return ""
        # The clock stands still while engines sample, so that there may be time left then.
        timeout_s = max(0.05, min(time_left(clock), clock.seconds_left - at_limit))
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
        sessions = AgentSessions.open(agent, self.config)
        async with self._launcher.serving(), self._launcher.gateway.open(sessions) as key:
            program = await self._run_program(task, agent, sessions, key, scoring)
            answer = self._launcher.final_answer(program, sessions.last_message())
            if scoring is not None and self._launcher.in_machine:
                while messages := await scoring.score(answer):  # another step of the task, in the same machine
                    program = await self._run_program(replace(task, prompt=messages), agent, sessions, key, scoring)
                    answer = self._launcher.final_answer(program, sessions.last_message())
                sessions.set_reward(None, scoring.reward, scoring.metrics)
                scoring = None
        folder = {} if program.cwd is None else {FOLDER: str(program.cwd)}
        return await self.finish(sessions, agent, scoring, answer, folder)

    async def _run_program(
        self, task: Task, agent: Agent, sessions: AgentSessions, key: str, scoring: AnswerScoring | None
    ) -> RunningProgram:
        """Run the program to its end, and return it.

        Raises:
            AgentProgramError, EpisodeError: see `AgentLoop.check`.
        """
        program_input = ProgramInput.from_task(self.config, task)
        machine = None if scoring is None else scoring.machine
        async with self._launcher.running(program_input, agent.episode_id, key, agent.tools, machine) as program:
            with waiting("agent", "program", lambda: describe_wait(sessions, agent.clock)):
                sessions.fault = await wait_for_end(program, sessions, agent.clock)
        self.check(sessions, program.output_end())
        return program
