"""Agents that play through the gateway: programs and agents elsewhere (``rollout.agent``), and programs of ``env.roles``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field, PrivateAttr, field_validator
from typing_extensions import override

from agentrl.config.base import Seconds, Section
from agentrl.core.errors import ConfigError

HarnessName = Literal["mini_swe_agent", "claude_code", "codex", "opencode", "openai_agents", "smolagents"]


CONTAINER = "container"
"""The sandbox of a program that works in the machine of its task."""
FILE = "file:"
"""Begins the name of a file in `AgentConfig.answer`."""
_AGENT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class ProgramAgentConfig(Section):
    """One of several agents of a program."""

    role: str | None = None
    """Its role; agents with one role are alike: baselines and metrics are by role. null: its name."""
    model: str | None = None
    """The model name that selects it in a request; null: its name."""


class ProgramConfig(Section):
    """A program that the run starts, and what it gets. docs/agents.md."""

    command: str | None = None
    """Starts the program, once an episode or for each move: words as in a shell, but no shell runs them. Words that name a file
    here are made whole paths, since the program starts in another folder. It finds the policy by the variables
    ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and others, and the task by
    ``AGENTRL_PROMPT`` and ``AGENTRL_TASK``. Its end is that of the episode, or of the move."""
    harness: HarnessName | None = None
    """A known agent program in place of ``command``, started by its recipe in ``agentrl/gateway/harnesses``. In a sandbox with an
    image it is that of the image; in others that of this machine, whose files the sandbox shows."""
    cwd: Path | None = None
    """The folder in which the program starts; null: an empty one for each start, which is removed after the reward."""
    files: Path | None = None
    """A folder whose contents are copied into the folder of each start first; with ``sandbox=container`` into a folder next
    to the task's, and words of the command that name a file in it are made whole paths there."""
    sandbox: str | None = None
    """The sandbox that the program runs in, a name as in ``sandbox.backend``, with the limits of the section ``sandbox``; null:
    none, it has the rights of this user. It reaches only the gateway, and ``sandbox.hosts`` through a proxy. ``container``: the
    machine of the task, with the task's user, working folder, limits and network; of an environment that opens one."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables. Of this process's the program gets only ``PATH``, locale, time zone and those of Python;
    ``HOME`` and ``TMPDIR`` are folders of the episode."""
    prompt: str = "{prompt}"
    """The text in ``AGENTRL_PROMPT`` and at the standard input; ``{prompt}`` is the text of the task's last message, or what an
    agent of an environment has read since its last move."""
    model: str = "policy"
    """The name of the policy for the program; with several agents theirs count."""
    answer: str = "message"
    """The final answer of an episode, for ``reward=environment`` and as ``sample.final`` of `reward.function`, or the move.
    ``message``: the
    policy's last turn. ``output``: what the program writes to its standard output. ``file:NAME``: a file in its folder."""
    _key: str = PrivateAttr("rollout.agent")

    @field_validator("answer")
    @classmethod
    def _check_answer(cls, answer: str) -> str:
        name = answer.removeprefix(FILE)
        if answer not in ("message", "output") and (name == answer or not name or Path(name).is_absolute()):
            raise ValueError(
                f"{answer!r} is no final answer: message, output, or {FILE}NAME, a file in the program's folder"
            )
        return answer

    @property
    def key(self) -> str:
        """The configuration key of this section, for messages."""
        return self._key

    @property
    def models(self) -> dict[str, str]:
        """The agent that each model name chooses, in the order of seats; empty if the program is one agent."""
        return {}

    @property
    def settings(self) -> list[str]:
        """The keys, with their values, of which each says what plays; at most one is allowed."""
        values = {"command": self.command, "harness": self.harness}
        return [f"{self.key}.{key}={value}" for key, value in values.items() if value is not None]

    @property
    def setting(self) -> str | None:
        """The key and value that say which agent plays; None: none does."""
        return next(iter(self.settings), None)


class SeatProgramConfig(ProgramConfig):
    """A program that plays an agent of an environment of several agents, with the policy as its model.
    docs/how_to/multi_agent.md.
    """

    start: Literal["turn", "episode"] = "turn"
    """``turn``: the program is started for each turn of its agent; the prompt is the observation, and ``answer`` is the move.
    ``episode``: it is started once; it requests its observations from the gateway, and posts its moves there."""

    def with_key(self, key: str) -> SeatProgramConfig:
        """Return the section with its configuration key, for messages."""
        config = self.model_copy()
        config._key = key
        return config


class AgentConfig(ProgramConfig):
    """An agent that plays the episodes in place of the environment: a program that the run starts, or one that runs elsewhere.
    docs/agents.md.
    """

    port: int | None = Field(default=None, ge=0, le=65535)
    """In place of ``command``: the agent runs elsewhere, starts a session for each episode at this port, and ends it. 0 takes a
    free port, which the run prints."""
    host: str = "127.0.0.1"
    """The address of this machine at which ``port`` is open. Others than the loopback require a token, which is the environment
    variable ``AGENTRL_AGENT_TOKEN``."""
    idle_timeout_s: Seconds | None = None
    """Seconds without a request, turns in progress not counted, after which an agent that runs elsewhere counts as lost; null:
    only ``rollout.max_seconds`` holds."""
    tasks: Literal["run", "application"] = "run"
    """Whose tasks an agent that runs elsewhere plays. ``application``: those that it brings with its sessions, such as requests
    in production; sessions with the same ``task.id`` are the samples of a group."""
    agents: dict[str, ProgramAgentConfig] = Field(default_factory=dict)
    """The agents of an episode by name, if there are several: each is a participant with its own rollout. A request chooses
    its agent by the address ``/s/KEY/agents/NAME``, the header ``x-agentrl-agent``, or its ``model``. ``env.roles`` and
    ``self_play`` say who plays them; the policy plays all others."""
    reward: Literal["function", "session", "environment"] = "function"
    """``function``: `reward.function`. ``environment``: what the environment gives for the final answer; it writes the prompt,
    too, and one without rewards is graded by `reward.function`. ``session``: what the program posts to ``/v1/session/reward``;
    code that the policy runs could post it too."""

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, agents: dict[str, ProgramAgentConfig]) -> dict[str, ProgramAgentConfig]:
        if len(agents) == 1:
            raise ValueError(f"{', '.join(agents)} is the only agent; name two or more, or none")
        for name in agents:
            if _AGENT_NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of an agent: a letter, and up to 63 letters, digits, _ or -")
        models = [agent.model or name for name, agent in agents.items()]
        if len(set(models)) < len(models):
            raise ValueError(
                f"several agents have the model {max(models, key=models.count)!r}; a request could not choose"
            )
        return agents

    @property
    def roles(self) -> dict[str, str]:
        """The role of each agent, in the order of seats; empty if there is one agent."""
        return {name: agent.role or name for name, agent in self.agents.items()}

    @property
    @override
    def models(self) -> dict[str, str]:
        return {agent.model or name: name for name, agent in self.agents.items()}

    @property
    def is_elsewhere(self) -> bool:
        """Whether the agent runs elsewhere."""
        return self.port is not None

    @property
    def url(self) -> str:
        """Where agents elsewhere start sessions, without ``/v1/sessions``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def brings_tasks(self) -> bool:
        """Whether the agent brings the tasks to train on."""
        return self.tasks == "application"

    @property
    @override
    def settings(self) -> list[str]:
        port = [] if self.port is None else [f"{self.key}.port={self.port}"]
        return [*super().settings, *port]


def command_words(command: str, key: str = "rollout.agent", *, resolve: bool = True) -> list[str]:
    """Return the words of ``KEY.command``; with ``resolve``, whole paths of those that are files here.

    Raises:
        ConfigError: there is none, or a quote is not closed.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{key}.command={command}: {error}") from None
    if not words:
        raise ConfigError(f"{key}.command is empty")
    if not resolve:
        return words
    return [words[0], *(str(Path(word).resolve()) if Path(word).is_file() else word for word in words[1:])]


def command_files(command: str) -> list[Path]:
    """Return the files that the command of a program names: its code."""
    return [Path(word) for word in command_words(command)[1:] if Path(word).is_file()]
