"""Episodes run by a user's own function: ``rollout.generate``."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from agentrl.core.env import EnvBase
from agentrl.core.errors import ConfigError, EpisodeError
from agentrl.core.imports import load_object
from agentrl.core.task import Task
from agentrl.core.types import Rollout, StopReason
from agentrl.core.user_code import await_user_code, user_code
from agentrl.episode.chat import Agent
from agentrl.episode.context import EpisodeContext
from agentrl.obs.waiting import ROLLOUT, waiting

F = TypeVar("F", bound=Callable[..., Any])
Generate = Callable[[Task, Agent], Awaitable[Rollout | Sequence[Rollout]]]
"""``async def generate(task, agent)``: talks with the policy and returns ``chat.rollout(...)``, or several."""

KEY = "rollout.generate"


def uses_tools(*names: str) -> Callable[[F], F]:
    """Declare the registered tools that a generate function calls; the default is those of ``env.name``.

    Example::

        @uses_tools("search")
        async def generate(task, agent): ...
    """

    def wrap(function: F) -> F:
        function.tool_names = names  # type: ignore[attr-defined]
        return function

    return wrap


def load_generate(reference: str) -> Generate:
    """Return the function that ``rollout.generate`` names.

    Raises:
        ConfigError: there is none, it is no ``async def``, or it does not take a task and an agent.
    """
    function = load_object(reference, KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}={reference} is no function but {function!r:.100}")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(f"{KEY}={reference} must be a coroutine without yield: async def generate(task, agent)")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{KEY}={reference} must take two arguments, async def generate(task, agent): {error}"
        ) from None
    return function  # type: ignore[no-any-return]


def required_tools(reference: str | None, env: type[EnvBase], options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a run's registered tools: those of its generate function, otherwise those of its environment.

    Args:
        reference: of the generate function, if there is one.
        env: class of the environment.
        options: of its constructor.
    """
    named = getattr(load_generate(reference), "tool_names", None) if reference is not None else None
    return tuple(named) if named is not None else env.registered_tools(options)


async def run_custom_loop(generate: Generate, context: EpisodeContext, agent: Agent) -> list[Rollout]:
    """Run a generate function for one attempt at an episode and return its rollouts; a failure is recorded in them.

    After ``rollout.max_seconds`` `Chat.sample` returns None. A function that has not returned a tenth of that time later
    is cancelled, and its chats are returned without a reward.

    Raises:
        ConfigError: the return value is not rollouts of the agent's chats.
    """
    try:
        async with agent.clock:
            returned = await _run(generate, context, agent)
        return _check_rollouts(returned, agent)
    except TimeoutError:
        if not agent.clock.expired:
            raise
        return agent.unfinished_rollouts(StopReason.MAX_TIME)
    except EpisodeError as error:
        return agent.unfinished_rollouts(StopReason.FAILED, error.as_failure())
    finally:
        await agent.close()


async def _run(generate: Generate, context: EpisodeContext, agent: Agent) -> object:
    with (
        user_code(lambda error: context.author_failure(_describe(generate, ": "), error)),
        waiting(ROLLOUT, agent.episode_id, lambda: f"turn {agent.turns}, {_describe(generate)}"),
    ):
        return await await_user_code(generate(agent.task, agent))


def _check_rollouts(returned: object, agent: Agent) -> list[Rollout]:
    rollouts = [returned] if isinstance(returned, Rollout) else returned
    if (
        not isinstance(rollouts, list | tuple)
        or not rollouts
        or not all(isinstance(rollout, Rollout) for rollout in rollouts)
    ):
        raise ConfigError(
            f"{KEY}: the function returned {returned!r:.200} for task {agent.task.id!r}; it must return chat.rollout(...), or a "
            "list of several chats' rollouts"
        )
    ids = [rollout.rollout_id for rollout in rollouts]
    if len(set(ids)) < len(ids) or not set(ids) <= agent.rollout_ids:
        raise ConfigError(
            f"{KEY}: the function returned for task {agent.task.id!r} the rollouts {', '.join(ids)}; each must come from a chat "
            "of this agent, one from each"
        )
    return list(rollouts)


def _describe(generate: Generate, separator: str = "=") -> str:
    """Return the key and the value that choose a loop: its own ``setting`` if it has one."""
    name = getattr(generate, "__qualname__", type(generate).__qualname__)
    return str(getattr(generate, "setting", f"{KEY}{separator}{name}"))
