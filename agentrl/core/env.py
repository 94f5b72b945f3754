"""Environments: Gymnasium environments whose observations and actions are messages, and their spaces.

Gymnasium's own ``Text`` space refuses every character outside a fixed set, even a space, so agentrl has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, get_args

import gymnasium
import numpy as np

from agentrl.core.background import run_coroutine
from agentrl.core.images import Image
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import (
    Action,
    Info,
    Message,
    Observation,
    Rewrite,
    Role,
    ToolCall,
    ToolCalls,
    ToolResults,
    json_state,
)

_SYLLABLES = ("a", "an", "be", "for", "it", "lo", "me", "no", "of", "so", "the", "to", "we", "yes", "zu")


def _sample_text(rng: np.random.Generator) -> str:
    words = [_SYLLABLES[int(rng.integers(len(_SYLLABLES)))] for _ in range(int(rng.integers(1, 8)))]
    return " ".join(words)


def observation_fault(observation: object) -> str:
    """Return what is wrong with an observation and what it should be, in one line; empty if nothing is."""
    if isinstance(observation, ToolCalls):
        is_valid = all(isinstance(call, ToolCall) for call in observation.calls)
        return "" if is_valid else f"{_short(observation)}, whose calls must be a tuple of ToolCalls"
    messages: Any = tuple(observation.messages) if isinstance(observation, Rewrite) else observation
    if not isinstance(messages, tuple) or not all(isinstance(message, Message) for message in messages):
        text = observation if isinstance(observation, str) else "…"
        return (
            f'{_short(observation)}, which must be a tuple of messages, such as (Message("user", {_short(text)}),), '
            "or ToolCalls or a Rewrite"
        )
    for message in messages:
        if message.role not in get_args(Role):
            return f"{_short(observation)}: roles are {', '.join(get_args(Role))}, and not {message.role!r}"
        if fault := _field_fault(message):
            return f"{_short(observation)}: {fault}"
    return ""


def _field_fault(message: Message) -> str:
    if not isinstance(message.content, str):
        return f"the content of a message must be a str, and is {_short(message.content)}"
    for name, kind in (("tool_calls", ToolCall), ("images", Image)):
        values = getattr(message, name)
        if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
            return f"the {name} of a message must be a tuple of {kind.__name__}, and is {_short(values)}"
    if not isinstance(message.tool_call_id, str | None):
        return f"the tool_call_id of a message must be a str, and is {_short(message.tool_call_id)}"
    return ""


def tools_fault(tools: object) -> str:
    """Return what is wrong with the `EnvBase.tools` of an environment, in one line; empty if nothing is."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Tool) for tool in tools):
        return f"tools must be a tuple of Tools, which @agentrl.tool makes, not {tools!r:.160}"
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f"tools has two tools of the name {twice!r}, and calls say only the name"


def _short(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, str) else f"{value!r:.160}"


class MessageSpace(gymnasium.Space[Any]):
    """All observations: tuples of `Message`, `ToolCalls` for the runner, or a `Rewrite`."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> tuple[Message, ...]:
        """Return one user message of random words."""
        return (Message("user", _sample_text(self.np_random)),)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an observation."""
        return not observation_fault(x)

    def __repr__(self) -> str:
        """Return the constructor."""
        return "MessageSpace()"

    def __eq__(self, other: object) -> bool:
        """All message spaces are the same."""
        return isinstance(other, MessageSpace)

    __hash__ = object.__hash__


class ActionSpace(gymnasium.Space[Any]):
    """All actions: an assistant `Message`, or the `ToolResults` of calls that the environment returned."""

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Message:
        """Return an assistant message of random words."""
        return Message("assistant", _sample_text(self.np_random))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an action."""
        return isinstance(x, ToolResults) or (isinstance(x, Message) and x.role == "assistant")

    def __repr__(self) -> str:
        """Return the constructor."""
        return "ActionSpace()"

    def __eq__(self, other: object) -> bool:
        """All action spaces are the same."""
        return isinstance(other, ActionSpace)

    __hash__ = object.__hash__


Step = tuple[Observation, float, bool, bool, Info]
"""``(observation, reward, terminated, truncated, info)``, as in Gymnasium."""

RESET_FORM = "(observation, info)"
"""What `Env.reset` returns."""
STEP_FORM = "(observation, reward, terminated, truncated, info)"
"""What `Env.step` returns."""


class EnvBase:
    """What environments of one agent (`Env`) and of several (`MultiAgentEnv`) have in common."""

    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end the policy's turn; they stay in its message."""
    tools: Sequence[Tool] = ()
    """Tools that the runner offers to the policy and runs on its behalf. They are read after `reset`, and again after the calls
    that it requests, whose results an environment may make tools from."""
    tool_names: ClassVar[tuple[str, ...]] = ()
    """Registered tools (``agentrl.tools``) that ``ToolCalls`` of this environment may name, next to its own ``tools``."""
    offered_servers: Sequence[str] = ()
    """Registered tools of which the policy may call all that their servers have with the run's options, next to `tools`."""
    handles_tool_calls: ClassVar[bool] = False
    """Whether `step` also receives messages with calls of `tools`, and answers them (mostly by returning them as
    `ToolCalls`). Otherwise the runner runs them, and the environment receives only messages without calls."""
    blocking: ClassVar[bool] = True
    """Whether `step` may take long, so that it runs in a thread. False: it runs on the event loop, where all other episodes wait
    for it; that saves a tenth of a turn's CPU time where `step` only reads and writes texts."""
    needs_reward: ClassVar[bool] = False
    """Whether it returns no reward itself, so that a run needs ``reward.function``."""
    opens_machine: ClassVar[bool] = False
    """Whether it opens a machine for each episode, in which an agent program can work (``rollout.agent.sandbox=container``): its
    ``info`` has ``machine``, the access that the tool server has given it."""
    generate: ClassVar[str | None] = None
    """What plays the episodes in place of steps, as ``rollout.generate``: a library that drives the loop itself."""
    task: Task
    """The task of the running episode."""

    @classmethod
    def registered_tools(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the registered tools whose servers a run needs, by the options of the constructor: `tool_names`."""
        return cls.tool_names

    @classmethod
    def example_task(cls) -> Task:
        """Return a task for examples and checks of the environment."""
        return Task("example", (Message("user", "Say hello."),), answer="hello")

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        """Return the environment's own tasks, used if ``tasks.name`` is not set.

        Raises:
            NotImplementedError: the environment has none.
        """
        raise NotImplementedError(f"{cls.__name__} defines no tasks(split, seed)")

    @classmethod
    def configured_tasks(cls, split: str, seed: int, options: Mapping[str, object]) -> Sequence[Task]:
        """Return the tasks of an environment that is built with ``options``; by default `tasks`, whatever they are.

        An environment whose options choose its tasks, such as the dataset of a library, overrides this.
        """
        return cls.tasks(split, seed)


class Env(EnvBase, gymnasium.Env[Observation, Action]):
    """Base class of environments with messages as observations and actions.

    Subclasses implement `step`, and `reset` if they wrap the prompt. Both are synchronous, do no I/O and need no running
    server. All randomness comes from ``self.np_random``, so that concurrent episodes replay bit for bit.

    An observation holds the messages *added* since the policy's last turn. An environment with its own text protocol may
    return `ToolCalls` instead; the runner runs them and steps again with the `ToolResults`. An environment that shortens
    the conversation returns a `Rewrite`: the policy continues from its messages alone.

    The last ``info`` of an episode may hold ``metrics``, a ``dict[str, float]`` that is averaged over episodes and logged, and
    ``final_answer``, which reward functions get as ``Sample.final``; without it, that is the policy's last turn.
    """

    observation_space: gymnasium.Space[Any] = MessageSpace()
    action_space: gymnasium.Space[Any] = ActionSpace()
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode on ``options["task"]`` (without one, on `example_task`) and return its first messages."""
        super().reset(seed=seed)
        self.task = (options or {}).get("task") or self.example_task()
        return self.task.prompt, {}

    def step(self, action: Action) -> Step:
        """Return the next observation and reward for the policy's message, or for the results of the returned calls."""
        raise NotImplementedError(f"{type(self).__name__} defines no step(action)")

    def truncate(self) -> tuple[float, Info] | ToolCalls:
        """Return the last reward, and an ``info``, of an episode that a limit of the run ends, such as ``rollout.max_turns``.

        By default the episode keeps what its steps gave. An environment that scores only whole episodes overrides this. One that
        a tool scores returns the calls; the steps that take their results then give the last reward.
        """
        return 0.0, {}

    def get_state(self) -> dict[str, Any]:
        """Return the JSON-able state of the episode; by default that of the random generator."""
        return {"np_random": json_state(self.np_random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned, after a `reset` on the same task."""
        self.np_random.bit_generator.state = state["np_random"]


class AsyncEnv(Env):
    """An environment that awaits: it implements the coroutines, and the synchronous methods run them.

    The synchronous methods share one event loop, in a thread, so that connections stay usable between them.
    """

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; see `Env.reset`."""
        return Env.reset(self, seed=seed, options=options)

    async def astep(self, action: Action) -> Step:
        """Take an action; see `Env.step`."""
        raise NotImplementedError(f"{type(self).__name__} defines no astep(action)")

    async def atruncate(self) -> tuple[float, Info] | ToolCalls:
        """Return the last reward of an episode that a limit ends; see `Env.truncate`."""
        return Env.truncate(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Run `areset` to its end; not for use inside an event loop."""
        return run_coroutine(self.areset(seed=seed, options=options))

    def step(self, action: Action) -> Step:
        """Run `astep` to its end; not for use inside an event loop."""
        return run_coroutine(self.astep(action))

    def truncate(self) -> tuple[float, Info] | ToolCalls:
        """Run `atruncate` to its end; not for use inside an event loop."""
        return run_coroutine(self.atruncate())

    async def aclose(self) -> None:
        """Release what the episode holds, such as connections. Awaited at the end of an episode, however it ends."""

    def close(self) -> None:
        """Run `aclose` to its end; not for use inside an event loop."""
        if type(self).aclose is not AsyncEnv.aclose:
            run_coroutine(self.aclose())


def returned_fault(returned: object, form: str) -> str:
    """Return what is wrong with what an environment returned, in one line, such as ``returned the info None, …``."""
    if not isinstance(returned, tuple) or len(returned) != form.count(",") + 1:
        return f"must return {form}, it returned {returned!r:.160}"
    if fault := observation_fault(returned[0]):
        return f"returned the observation {fault}"
    for name, flag in zip(("terminated", "truncated"), returned[2:-1], strict=False):
        if not isinstance(flag, bool | np.bool_ | int):
            return f"returned {name}={flag!r:.160}, which must be a bool"
    info = returned[-1]
    return "" if isinstance(info, dict) else f"returned the info {info!r:.160}, which must be a dict"
