"""Agent programs that play episodes: started once an episode, with the endpoints of the gateway in their environment."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from agentrl.config.agent import FILE, AgentConfig, command_words
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Rollout
from agentrl.episode.chat import Agent
from agentrl.episode.env_steps import AnswerScoring
from agentrl.gateway.agent_loop import AgentLoop, describe_wait, late, time_left
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.harnesses.recipes import installed_harness
from agentrl.gateway.program_process import ProgramProcess, RunningProgram, read_start
from agentrl.gateway.sandboxed_program import GATEWAY_HOST, EpisodeSandboxes, agent_sandbox
from agentrl.gateway.server import Gateway
from agentrl.obs.waiting import waiting
from agentrl.sandbox.shown_folders import check_shown

_log = logging.getLogger(__name__)

KEY = "rollout.agent"
FOLDER = "agent_folder"
"""Key of `Rollout.metadata` with the folder in which the program ran; a reward function finds its files there."""


def check_agent(config: AgentConfig, sandbox: SandboxConfig, private_paths: Mapping[Path, str] | None = None) -> None:
    """Check what can be known of an agent program before it is started.

    Args:
        config: of the program.
        sandbox: the ``sandbox`` section of the run.
        private_paths: files and folders that a program in a sandbox must not read, each with a description.

    Raises:
        ConfigError: the program or a folder does not exist, or the sandbox would show what is private.
        MissingError: this machine lacks the harness, or something that the sandbox needs.
    """
    path = config.env.get("PATH")
    words = command_words(config.command) if config.command is not None else []
    if config.sandbox is not None:
        own_sandbox = agent_sandbox(config, sandbox)
        check_shown(own_sandbox, private_paths)
        if own_sandbox.limits != sandbox.limits:
            raised = [f"{key}={value}" for key, value in own_sandbox.limits if value != getattr(sandbox.limits, key)]
            _log.info("%s raises sandbox.limits of its sandboxes: %s", config.setting, ", ".join(raised))
    elif config.harness is not None:
        installed_harness(config.harness, path)
    elif shutil.which(words[0], path=path) is None:
        raise ConfigError(f"{KEY}.command={config.command}: there is no program {words[0]}")
    for key, folder in (("cwd", config.cwd), ("files", config.files)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{KEY}.{key}={folder} is no folder")


class AgentProgram(AgentLoop):
    """Plays episodes with an agent program; a `agentrl.episode.custom_loop.Generate` function.

    Args:
        config: of the program.
        sandbox: limits of its sandboxes, if it has any.
    """

    def __init__(self, config: AgentConfig, sandbox: SandboxConfig) -> None:
        super().__init__(config)
        self._sandboxes: EpisodeSandboxes | None = None
        if config.sandbox is not None:
            self._sandboxes = EpisodeSandboxes(config, sandbox)
        self._gateway = Gateway(LOOPBACK if self._sandboxes is None else GATEWAY_HOST)

    @override
    async def run(self, task: Task, agent: Agent, scoring: AnswerScoring | None) -> list[Rollout]:
        sessions = AgentSessions.open(agent, self.config)
        async with self._gateway.serving() as url, self._gateway.open(sessions) as key:
            if self._sandboxes is None:
                program: RunningProgram = await ProgramProcess.start(self.config, task, url, key)
                sessions.fault = await self._play(program, sessions, agent)
            else:
                async with self._sandboxes.backend(url) as backend:
                    program = await self._sandboxes.start(backend, task, agent.episode_id, key)
                    sessions.fault = await self._play(program, sessions, agent)
        self.check(sessions, program.output_end())
        answer = self._final_answer(program, sessions)
        return await self.finish(sessions, agent, scoring, answer, {FOLDER: str(program.cwd)})

    def _final_answer(self, program: RunningProgram, sessions: AgentSessions) -> str:
        kind = self.config.answer
        if kind == "message":
            return sessions.last_message()
        return program.output() if kind == "output" else read_start(program.cwd / kind.removeprefix(FILE))

    async def _play(self, program: RunningProgram, sessions: AgentSessions, agent: Agent) -> str:
        """Wait for the end of a program, or end it; return what is wrong with it, or nothing."""
        agent.tools.on_close(program.close)
        try:
            with waiting("agent", "program", lambda: describe_wait(sessions, agent.clock)):
                return await self._wait(program, sessions, agent)
        finally:
            await program.kill()

    async def _wait(self, program: RunningProgram, sessions: AgentSessions, agent: Agent) -> str:
        """Wait for the end of the program or of its time; return what is wrong with it, or nothing."""
        while time_left(agent.clock) > 0:
            # The clock stands still while engines sample, so that there may be time left then.
            ends: set[asyncio.Future[Any]] = {program.ended, sessions.failure}
            timeout_s = max(0.05, time_left(agent.clock))
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if program.ended.done():
                return "" if sessions.at_limit else program.ended.result()
            if sessions.failure.done():
                return "was ended"
        return late(agent.clock)
