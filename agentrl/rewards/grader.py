"""Grades rollouts by the user's reward function (``reward.function``)."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.config.schema import Config
from agentrl.config.tasks import DataConfig, RewardConfig
from agentrl.core.errors import ConfigError, RunStopped, SandboxFailure, ToolFailure
from agentrl.core.registry import REWARDS, names, reward_function
from agentrl.core.task import Task
from agentrl.core.tool import CallTool
from agentrl.core.types import Failure, FailureKind, Rollout
from agentrl.core.user_code import TimeLimitExceeded, await_user_code, call_in_thread, describe, user_error
from agentrl.obs.waiting import waiting
from agentrl.rewards import builtin
from agentrl.rewards.sample import Sample


class Grader(Protocol):
    """Sets the reward of rollouts after they have ended, in place of the environment's."""

    @property
    def group(self) -> bool:
        """Whether it needs all rollouts of a task at once; otherwise it gets them one by one."""
        ...

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` (and values in ``metrics``) of rollouts of one task; a rollout that cannot be graded is dropped.

        ``tools`` has, by ``rollout_id``, a function that runs tools in the session of that episode.

        Raises:
            RunStopped: a rollout cannot be graded, and the configuration stops the run then.
        """
        ...


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
"""Characters of a prompt or response in a message."""


class RewardGrader:
    """Implements `agentrl.rewards.grader.Grader` with ``reward.function``; made by `make_grader`."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.function is not None
        self._config = config
        self._name = config.function
        self._call = FunctionRunner(reward_function(config.function), config.function, config.timeout_s)

    @property
    def group(self) -> bool:
        """Whether the function takes all rollouts of a task at once."""
        return self._call.group

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` of rollouts of one task, and ``metrics`` if the function returns a mapping.

        If the function fails, ``reward.on_error`` decides what happens; the failure is in ``rollout.failure``. If it fails
        because a tool server or sandbox failed (``tools``, by rollout id), the rollouts are dropped.

        Raises:
            RunStopped: it failed and ``reward.on_error=stop``.
        """
        for batch in [rollouts] if self.group else [[rollout] for rollout in rollouts]:
            await self._grade(batch, tools or {})

    async def _grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool]) -> None:
        try:
            with waiting("reward function", self._name):
                result = await self._call(
                    [Sample.from_rollout(rollout, tools.get(rollout.rollout_id)) for rollout in rollouts]
                )
            results = self._split(result, len(rollouts)) if self.group else [result]
        except (ToolFailure, SandboxFailure) as error:
            for rollout in rollouts:
                rollout.failure, rollout.dropped = error.as_failure(), True
            return
        except BaseException as error:
            self._apply_on_error(rollouts, user_error(error))
            return
        for rollout, result in zip(rollouts, results, strict=True):
            try:
                reward, metrics = self._score(result)
            except BaseException as error:  # of the class of the user's object, too
                self._apply_on_error([rollout], user_error(error))
            else:
                rollout.reward = reward
                rollout.metrics = rollout.metrics | metrics

    def _split(self, result: Any, count: int) -> list[Any]:
        if isinstance(result, str | bytes | Mapping) or not hasattr(result, "__len__"):
            raise ValueError(f"it got {count} samples and must return a list of as many rewards, not {_short(result)}")
        rewards = list(result)
        if len(rewards) != count:
            raise ValueError(f"it got {count} samples and returned {len(rewards)} rewards: {_short(result)}")
        return rewards

    def _score(self, result: Any) -> tuple[float, dict[str, float]]:
        """Return the reward, and the other numbers of a mapping as metrics."""
        if not isinstance(result, Mapping):
            return _finite(result, "it returned"), {}
        key = self._config.key or (SCORE if SCORE in result else None)
        has = f"it returned a mapping with the keys {', '.join(map(str, result)) or 'none'}"
        if key is None:
            raise ValueError(f"{has}; set reward.key to the one that is the reward")
        if key not in result:
            raise ValueError(f"{has}, and no {key!r}; change reward.key={key}")
        numbers_by_name = {str(name): value for name, value in result.items() if name != key and _is_number(value)}
        metrics = {name: _finite(value, f"its {name!r} is") for name, value in numbers_by_name.items()}
        return _finite(result[key], f"its {key!r} is"), metrics

    def _apply_on_error(self, rollouts: Sequence[Rollout], error: BaseException) -> None:
        message = describe(error)
        if self._config.on_error == "stop":
            raise RunStopped(
                f"reward.function={self._name} failed: {message}\n{_sample_excerpt(rollouts)}\n"
                "(reward.on_error=drop leaves such samples out, reward.on_error=score gives them reward.error_score)"
            ) from error
        for rollout in rollouts:
            rollout.failure = Failure(FailureKind.REWARD, type(error).__name__, f"{self._name}: {message}")
            if self._config.on_error == "drop":
                rollout.dropped = True
            else:
                rollout.reward = self._config.error_score


def make_grader(config: RewardConfig) -> RewardGrader | None:
    """Return the grader of a configuration, or None if the environment's reward is kept.

    Raises:
        ConfigError, UnknownNameError: the function does not exist, or does not take one argument.
    """
    return RewardGrader(config) if config.function is not None else None


def check_reward(config: Config, *, needs_reward: bool) -> None:
    """Check the reward section before anything is started.

    Args:
        config: the run's configuration.
        needs_reward: whether the environment sets no reward.

    Raises:
        ConfigError, UnknownNameError: a function is needed and missing, or cannot be used.
    """
    reward, data = config.reward, config.data
    if reward.function is None:
        if needs_reward:
            player = config.rollout.agent.setting or f"env.name={config.env.name}"
            raise ConfigError(
                f"{player} sets no reward: set reward.function to my_rewards.py:score, "
                f"module:function, or one that is built in: {', '.join(names(REWARDS))}"
            )
        return
    make_grader(reward)
    from_files = data.path is not None or data.eval_path is not None
    needs_label = reward.function in names(REWARDS) and reward_function(reward.function) is not builtin.ifbench
    if from_files and data.label_key is None and needs_label:
        raise ConfigError(
            f"reward.function={reward.function} compares with the right answer: set data.label_key to its column"
        )


def label_warning(reward: RewardConfig, data: DataConfig) -> str:
    """Return a warning if the user's function reads ``sample.label``, and no column of the data files is the label; else ""."""
    from_files = data.path is not None or data.eval_path is not None
    if reward.function is None or not from_files or data.label_key is not None:
        return ""
    code = getattr(inspect.unwrap(reward_function(reward.function)), "__code__", None)
    if code is None or "label" not in code.co_names:
        return ""
    return (
        f"warning: reward.function={reward.function} reads the label, which is None: set data.label_key to its column"
    )


def check_labels(reward: RewardConfig, tasks: Iterable[Task]) -> None:
    """Check that a reward function of agentrl can compare with the answers of tasks.

    Raises:
        ConfigError: an answer is none that the function compares with.
    """
    if reward.function is None or reward.function not in names(REWARDS):
        return
    function = reward_function(reward.function)
    if function.__module__ != builtin.__name__:
        return
    for task in tasks:
        try:
            builtin.check_task(function, task.answer, task.metadata, task.id)
        except ValueError as error:
            raise ConfigError(f"reward.function={reward.function}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(_plain(value), numbers.Real)


def _finite(value: Any, subject: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise ValueError(f"{subject} {_short(value)}, which is not a number")
    number = float(plain)
    if not math.isfinite(number):
        raise ValueError(f"{subject} {number}, which is not finite")
    return number


def _plain(value: Any) -> Any:
    """Return the number in a NumPy scalar or in a tensor of one element."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}… ({len(text)} characters)"


def _sample_excerpt(rollouts: Sequence[Rollout]) -> str:
    first = Sample.from_rollout(rollouts[0])
    others_text = f" and {len(rollouts) - 1} others of its group" if len(rollouts) > 1 else ""
    return (
        f"sample    {first.rollout_id} of task {first.prompt_id}{others_text}\n"
        f"prompt    {_short(first.prompt)}\nresponse  {_short(first.response)}\nlabel     {_short(first.label)}"
    )
