"""What an environment is: a Gymnasium environment whose observations and actions are messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium

from agentrl.core.spaces import ActionSpace, MessageSpace
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import Action, Info, Message, Observation, json_state

Step = tuple[Observation, float, bool, bool, Info]
"""``(observation, reward, terminated, truncated, info)``, as Gymnasium has it."""


class Env(gymnasium.Env[Observation, Action]):
    """An environment at the level of messages.

    Subclasses implement `step`, and `reset` where the prompt needs wrapping. Both are synchronous, do no I/O and
    work with no server running. All randomness comes from ``self.np_random``, so that episodes that run beside
    each other replay bit for bit.

    An observation holds the messages *added* since the policy last spoke. An environment with a text protocol of
    its own may return `ToolCalls` in its place; the runner runs them and steps again with the `ToolResults`. One that
    shortens the conversation returns a `Rewrite`: the policy goes on from its messages alone.

    The last ``info`` of an episode may hold ``metrics``, a ``dict[str, float]`` that is averaged over episodes and logged.
    """

    observation_space: gymnasium.Space[Any] = MessageSpace()
    action_space: gymnasium.Space[Any] = ActionSpace()
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    stop: ClassVar[tuple[str, ...]] = ()
    """Strings that end the policy's turn; they stay in what it said."""
    tools: Sequence[Tool] = ()
    """Tools that the runner offers to the policy and runs on its behalf."""
    tool_names: ClassVar[tuple[str, ...]] = ()
    """Registered tools (``agentrl.tools``) that ``ToolCalls`` of this environment may name, beside its own ``tools``."""
    handles_tool_calls: ClassVar[bool] = False
    """Whether `step` is given what the policy says in calls of `tools` too, and answers it (mostly with `ToolCalls` of
    them); without it the runner runs them, and the environment hears only what the policy says without a call."""
    needs_reward: ClassVar[bool] = False
    """Whether it gives no reward of its own, so that a run wants ``reward.function``."""
    task: Task
    """The task of the running episode."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode on ``options["task"]`` (without one, on `example_task`) and return its first messages."""
        super().reset(seed=seed)
        self.task = (options or {}).get("task") or self.example_task()
        return self.task.prompt, {}

    def step(self, action: Action) -> Step:
        """Take what the policy said (or the results of the calls asked for) and answer."""
        raise NotImplementedError

    @classmethod
    def example_task(cls) -> Task:
        """Return a task to show and to check the environment with."""
        return Task("example", (Message("user", "Say hello."),), answer="hello")

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        """Return tasks of the environment's own, used when ``tasks.name`` is not set.

        Raises:
            NotImplementedError: the environment has none.

        """
        raise NotImplementedError(f"{cls.__name__} defines no tasks(split, seed)")

    def get_state(self) -> dict[str, Any]:
        """Return everything needed to go on, JSON-able: by default the generator's state."""
        return {"np_random": json_state(self.np_random.bit_generator.state)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what `get_state` returned, after a `reset` on the same task."""
        self.np_random.bit_generator.state = state["np_random"]


class AsyncEnv(Env):
    """An environment that must wait: it implements the coroutines, the synchronous pair follows from them."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; see `Env.reset`."""
        return Env.reset(self, seed=seed, options=options)

    async def astep(self, action: Action) -> Step:
        """Take an action; see `Env.step`."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Run `areset` to its end; not for use inside an event loop."""
        return asyncio.run(self.areset(seed=seed, options=options))

    def step(self, action: Action) -> Step:
        """Run `astep` to its end; not for use inside an event loop."""
        return asyncio.run(self.astep(action))
