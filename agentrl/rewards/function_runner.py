"""Runs a reward function: on one sample or a group, in a thread or as a coroutine, with a time limit."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.core.user_code import TimeLimitExceeded, await_user_code, call_in_thread
from agentrl.rewards.sample import Sample

THREADS = 16
"""Concurrent calls of a plain function; an ``async def`` has no such limit."""
_SEQUENCES = {"list", "List", "Sequence", "tuple", "Tuple", "Iterable"}


class FunctionRunner:
    """Calls a reward function.

    Args:
        function: plain or ``async``; takes one sample, or a group if its parameter is named ``samples`` or
            annotated as ``list[Sample]`` or another sequence.
        name: its name in the configuration, for messages.
        timeout_s: seconds a call may take.

    Raises:
        ConfigError: the function does not take exactly one argument.
    """

    def __init__(self, function: Callable[..., Any], name: str, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
        )
        self._threads = asyncio.Semaphore(THREADS)
        self.group = takes_group(function, name)
        """Whether it takes all samples of a task at once."""

    async def __call__(self, samples: Sequence[Sample]) -> Any:
        """Return the function's result for one sample, or for a group.

        Raises:
            TimeoutError: it took longer than ``timeout_s``. A plain function's thread cannot be ended and runs on.
            BaseException: what the function raises; see `agentrl.core.user_code.user_error`.
        """
        argument: Any = list(samples) if self.group else samples[0]
        if self._async:
            return await self._in_time(self._function(argument))
        async with self._threads:
            result = await self._in_time(call_in_thread(lambda: self._function(argument), "reward"))
        return await self._in_time(result) if inspect.isawaitable(result) else result

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        try:
            return await await_user_code(work, self._timeout_s)
        except TimeLimitExceeded:
            raise TimeoutError(
                f"it took longer than reward.timeout_s={self._timeout_s:g}; raise it, or make the function faster"
            ) from None


def takes_group(function: Callable[..., Any], name: str) -> bool:
    """Return whether the function takes a group of samples instead of one.

    Raises:
        ConfigError: it does not take exactly one argument.
    """
    parameters = _parameters(function)
    if len(parameters) != 1:
        names = ", ".join(parameter.name for parameter in parameters) or "nothing"
        raise ConfigError(
            f"reward.function={name} takes {names}; a reward function takes one argument: sample, or samples for a group"
        )
    parameter = parameters[0]
    annotation = _annotation(function, parameter)
    return parameter.name == "samples" or annotation.split("[")[0].rpartition(".")[2] in _SEQUENCES


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters without a default, or the first if all have one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a built-in without a signature
        return []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return ([p for p in positional if p.default is p.empty] or positional[:1]) + keywords


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    if parameter.annotation is parameter.empty:
        return ""
    if isinstance(parameter.annotation, str):
        return parameter.annotation.strip("'\" ")
    origin = typing.get_origin(parameter.annotation) or parameter.annotation
    return str(getattr(origin, "__name__", origin))
