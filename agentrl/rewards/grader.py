"""Gives rollouts the reward that a function of the user's says."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.reward import RewardConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, RunStopped, SandboxFailure, ToolFailure
from agentrl.core.imports import describe
from agentrl.core.registry import REWARDS, names, reward_function
from agentrl.core.tool import CallTool
from agentrl.core.types import Failure, FailureKind, Rollout
from agentrl.obs.waiting import waiting
from agentrl.rewards.function_runner import RewardCall
from agentrl.rewards.sample import Sample

_SHOWN = 400
"""Characters of a prompt or response in a message."""


class RewardGrader:
    """Implements `agentrl.rewards.base.Grader` with ``reward.function``; made by `make_grader`."""

    def __init__(self, config: RewardConfig) -> None:
        assert config.function is not None
        self._config = config
        self._name = config.function
        self._call = RewardCall(reward_function(config.function), config.function, config.timeout_s)

    @property
    def group(self) -> bool:
        """Whether the function wants all rollouts of a task at the same time."""
        return self._call.group

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward``, and ``metrics`` where the function returned more, of rollouts of one task.

        Where the function fails on them, ``reward.on_error`` says what follows; the failure is in ``rollout.failure``.
        Where a tool's server failed it (``tools``, by rollout id), the rollouts are dropped: that is nobody's reward.

        Raises:
            RunStopped: it failed and ``reward.on_error=stop``.

        """
        for some in [rollouts] if self.group else [[rollout] for rollout in rollouts]:
            await self._grade(some, tools or {})

    async def _grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool]) -> None:
        try:
            with waiting("reward function", self._name):
                said = await self._call([Sample.of(rollout, tools.get(rollout.rollout_id)) for rollout in rollouts])
            each = self._each(said, len(rollouts)) if self.group else [said]
        except (ToolFailure, SandboxFailure) as error:
            for rollout in rollouts:
                rollout.failure, rollout.dropped = error.as_failure(), True
            return
        except Exception as error:  # whatever a function of the user's raises
            self._failed(rollouts, error)
            return
        for rollout, one in zip(rollouts, each, strict=True):
            try:
                reward, metrics = self._score(one)
            except ValueError as error:
                self._failed([rollout], error)
            else:
                rollout.reward = reward
                rollout.metrics = rollout.metrics | metrics

    def _each(self, said: Any, count: int) -> list[Any]:
        if isinstance(said, str | bytes | Mapping) or not hasattr(said, "__len__"):
            raise ValueError(f"it got {count} samples and must return a list of as many rewards, not {_short(said)}")
        each = list(said)
        if len(each) != count:
            raise ValueError(f"it got {count} samples and returned {len(each)} rewards: {_short(said)}")
        return each

    def _score(self, said: Any) -> tuple[float, dict[str, float]]:
        """Return the reward, and the other figures of a mapping."""
        if not isinstance(said, Mapping):
            return _finite(said, "it returned"), {}
        key = self._config.key
        has = f"it returned a mapping with the keys {', '.join(map(str, said)) or 'none'}"
        if key is None:
            raise ValueError(f"{has}; set reward.key to the one that is the reward")
        if key not in said:
            raise ValueError(f"{has}, and no {key!r}; change reward.key={key}")
        others = {str(name): value for name, value in said.items() if name != key and _is_number(value)}
        metrics = {name: _finite(value, f"its {name!r} is") for name, value in others.items()}
        return _finite(said[key], f"its {key!r} is"), metrics

    def _failed(self, rollouts: Sequence[Rollout], error: Exception) -> None:
        """Do with the rollouts as ``reward.on_error`` says."""
        said = describe(error)
        if self._config.on_error == "stop":
            raise RunStopped(
                f"reward.function={self._name} failed: {said}\n{_shown(rollouts)}\n"
                "(reward.on_error=drop leaves such samples out, reward.on_error=score gives them reward.error_score)"
            ) from error
        for rollout in rollouts:
            rollout.failure = Failure(FailureKind.REWARD, type(error).__name__, f"{self._name}: {said}")
            if self._config.on_error == "drop":
                rollout.dropped = True
            else:
                rollout.reward = self._config.error_score


def make_grader(config: RewardConfig) -> RewardGrader | None:
    """Return the grader of a configuration, or None where the environment's reward stands.

    Raises:
        ConfigError, UnknownNameError: the function does not exist, or does not take one argument.

    """
    return RewardGrader(config) if config.function is not None else None


def check_reward(config: Config, *, needs_reward: bool) -> None:
    """Check what can be known of the reward before anything runs.

    Args:
        config: the run's configuration.
        needs_reward: the environment gives no reward of its own.

    Raises:
        ConfigError, UnknownNameError: there is no function where one is needed, or it cannot be used.

    """
    reward, data = config.reward, config.data
    if reward.function is None:
        if needs_reward:
            raise ConfigError(
                f"env.name={config.env.name} gives no reward of its own: set reward.function to my_rewards.py:score, "
                f"module:function, or one that is built in: {', '.join(names(REWARDS))}"
            )
        return
    make_grader(reward)
    from_files = data.path is not None or data.eval_path is not None
    if from_files and data.label_key is None and reward.function in names(REWARDS):
        raise ConfigError(
            f"reward.function={reward.function} compares with the right answer: set data.label_key to its column"
        )


def _is_number(value: Any) -> bool:
    return isinstance(_plain(value), numbers.Real)


def _finite(value: Any, what: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, numbers.Real):
        raise ValueError(f"{what} {_short(value)}, and no number")
    number = float(plain)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, and no finite number")
    return number


def _plain(value: Any) -> Any:
    """Return the number in a NumPy scalar or in a tensor of one element."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"


def _shown(rollouts: Sequence[Rollout]) -> str:
    first = Sample.of(rollouts[0])
    others = f" and {len(rollouts) - 1} others of its group" if len(rollouts) > 1 else ""
    return (
        f"sample    {first.rollout_id} of task {first.prompt_id}{others}\n"
        f"prompt    {_short(first.prompt)}\nresponse  {_short(first.response)}\nlabel     {_short(first.label)}"
    )
