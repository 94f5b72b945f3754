"""Reward functions: how they are called, and what they may return."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from agentrl.config.rewards import RewardFunctionConfig
from agentrl.core.errors import ConfigError
from agentrl.core.registry import reward_function
from agentrl.core.user_code import TimeLimitExceeded, await_user_code, call_in_thread, user_error
from agentrl.rewards.sample import Sample
from agentrl.rewards.scoring import Outcome

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


SCORE = "score"
"""Key of the reward in a mapping without ``reward.key``."""
_EXCERPT = 400
"""Characters of a value in a message."""


class FunctionScorer:
    """Implements `agentrl.rewards.scoring.Scorer` with a function, which may be the user's."""

    metric_prefix = ""

    def __init__(self, config: RewardFunctionConfig) -> None:
        assert config.function is not None
        self._key = config.key
        self._call = FunctionRunner(reward_function(config.function), config.function, config.timeout_s)
        self.group = self._call.group

    async def score(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return the function's results. An error of a group's call is that of all of its samples."""
        try:
            result = await self._call(samples)
            results = _split(result, len(samples)) if self.group else [result]
        except BaseException as error:
            raised = user_error(error)
            return [Outcome(error=raised) for _ in samples]
        outcomes = []
        for value in results:
            try:
                outcomes.append(read_score(value, self._key))
            except BaseException as error:  # of the class of the user's object, too
                outcomes.append(Outcome(error=user_error(error)))
        return outcomes


def _split(result: Any, count: int) -> list[Any]:
    if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
        raise ValueError(f"it got {count} samples and must return a list of as many rewards, not {short_text(result)}")
    rewards = list(result)
    if len(rewards) != count:
        raise ValueError(f"it got {count} samples and returned {len(rewards)} rewards: {short_text(result)}")
    return rewards


def read_score(result: Any, key: str | None) -> Outcome:
    """Return the reward in a number or a mapping, and the other numbers of a mapping as metrics.

    Args:
        result: of a function, or of a remote reward model.
        key: ``reward.key``.

    Raises:
        ValueError: there is no finite number.
    """
    if not isinstance(result, Mapping):
        return Outcome(_finite(result, "it returned"))
    key = key or (SCORE if SCORE in result else None)
    has = f"it returned a mapping with the keys {', '.join(map(str, result)) or 'none'}"
    if key is None:
        raise ValueError(f"{has}; set reward.key to the one that is the reward")
    if key not in result:
        raise ValueError(f"{has}, and no {key!r}; change reward.key={key}")
    numbers_by_name = {str(name): value for name, value in result.items() if name != key and _is_number(value)}
    metrics = {name: _finite(value, f"its {name!r} is") for name, value in numbers_by_name.items()}
    return Outcome(_finite(result[key], f"its {key!r} is"), metrics)


def _is_number(value: Any) -> bool:
    return isinstance(_plain(value), numbers.Real)


def _finite(value: Any, subject: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise ValueError(f"{subject} {short_text(value)}, which is not a number")
    number = float(plain)
    if not math.isfinite(number):
        raise ValueError(f"{subject} {number}, which is not finite")
    return number


def _plain(value: Any) -> Any:
    """Return the number in a NumPy scalar or in a tensor of one element."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def short_text(value: object) -> str:
    """Return a value's representation, cut for a message."""
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}… ({len(text)} characters)"
