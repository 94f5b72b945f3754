"""Grades rollouts by the section ``reward``: functions, remote reward models, judges, and their weighted sum."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from agentrl.config.rewards import JUDGE, REMOTE, RewardConfig, RewardFunctionConfig, WeightedRewardConfig
from agentrl.config.schema import Config
from agentrl.config.tasks import DataConfig
from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.errors import ConfigError, EpisodeError, RunStopped
from agentrl.core.registry import REWARDS, names, reward_function
from agentrl.core.task import Task
from agentrl.core.tool import CallTool
from agentrl.core.types import Failure, FailureKind, RewardTerm, Rollout
from agentrl.core.user_code import describe
from agentrl.obs.waiting import waiting
from agentrl.rewards import builtin
from agentrl.rewards.functions import FunctionScorer, short_text
from agentrl.rewards.judge import JudgeScorer
from agentrl.rewards.remote import RemoteScorer
from agentrl.rewards.sample import Sample
from agentrl.rewards.scoring import Outcome, Scorer

ENVIRONMENT = "environment"
"""The built-in function that returns the environment's own reward."""


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


@dataclass(frozen=True, slots=True)
class _Term:
    """One of the rewards of a grader."""

    name: str
    weight: float
    config: RewardFunctionConfig
    scorer: Scorer


class RewardGrader:
    """Implements `Grader` with the section ``reward``; made by `make_grader`.

    Args:
        config: with a function, or several.
        models: the judge models of the run, by the name of their reward.
    """

    def __init__(self, config: RewardConfig, models: Mapping[str, ChatEndpoint] = MappingProxyType({})) -> None:
        self._terms = [
            _Term(name, _weight(reward), reward, make_scorer(config, name, models))
            for name, reward in config.by_name.items()
        ]
        self._has_several = bool(config.functions)

    @property
    def group(self) -> bool:
        """Whether one of the rewards needs all rollouts of a task at once."""
        return any(term.scorer.group for term in self._terms)

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        """Set ``reward`` of rollouts of one task, and add to ``metrics``; of several rewards set ``rewards``, too.

        If a function fails, ``reward.on_error`` decides what happens; the failure is in ``rollout.failure``. If it fails
        because a service, a judge, a tool server or a sandbox failed, the rollout is dropped.

        Raises:
            RunStopped: it failed and ``reward.on_error=stop``.
        """
        tools = tools or {}
        samples = [Sample.from_rollout(rollout, tools.get(rollout.rollout_id)) for rollout in rollouts]
        if len(self._terms) == 1:
            outcomes = [await _score(self._terms[0], samples)]
        else:
            outcomes = await asyncio.gather(*(_score(term, samples) for term in self._terms))
        for number, rollout in enumerate(rollouts):
            values: dict[str, float | None] = {}
            for term, term_outcomes in zip(self._terms, outcomes, strict=True):
                outcome = term_outcomes[number]
                prefix = f"{term.name}/" if self._has_several else term.scorer.metric_prefix
                rollout.metrics = rollout.metrics | {prefix + key: value for key, value in outcome.metrics.items()}
                if outcome.error is not None:
                    same = [sample_outcome.error is outcome.error for sample_outcome in term_outcomes]
                    concerned = [rollout for rollout, is_same in zip(rollouts, same, strict=True) if is_same]
                    values[term.name] = self._decide(term, outcome, rollout, concerned)
                else:
                    values[term.name] = outcome.reward
            self._set_reward(rollout, values)

    def _set_reward(self, rollout: Rollout, values: Mapping[str, float | None]) -> None:
        if self._has_several:
            rollout.rewards = {term.name: RewardTerm(values[term.name], term.weight) for term in self._terms}
        if None in values.values():
            rollout.dropped = True
        elif self._has_several:
            rollout.reward = sum(term.weighted for term in rollout.rewards.values())
        else:
            (rollout.reward,) = (value for value in values.values() if value is not None)

    def _decide(self, term: _Term, outcome: Outcome, rollout: Rollout, concerned: Sequence[Rollout]) -> float | None:
        """Return the reward of a rollout whose scoring failed; None: it has none, and is dropped."""
        error = outcome.error
        assert error is not None
        if isinstance(error, EpisodeError):
            rollout.failure = error.as_failure()
            return None
        message = describe(error)
        if term.config.on_error == "stop" and not outcome.is_outage:
            raise RunStopped(
                f"reward.function={term.config.function} failed: {message}\n{_sample_excerpt(concerned)}\n"
                "(reward.on_error=drop leaves such samples out, reward.on_error=score gives them reward.error_score)"
            ) from error
        rollout.failure = Failure(FailureKind.REWARD, type(error).__name__, f"{term.name}: {message}")
        return term.config.error_score if term.config.on_error == "score" and not outcome.is_outage else None


def _weight(config: RewardFunctionConfig) -> float:
    return config.weight if isinstance(config, WeightedRewardConfig) else 1.0


async def _score(term: _Term, samples: Sequence[Sample]) -> list[Outcome]:
    with waiting("reward function", term.name):
        if term.scorer.group or len(samples) == 1:
            return await term.scorer.score(samples)
        outcomes = await asyncio.gather(*(term.scorer.score([sample]) for sample in samples))
        return [outcome for (outcome,) in outcomes]


def make_scorer(config: RewardConfig, name: str, models: Mapping[str, ChatEndpoint] = MappingProxyType({})) -> Scorer:
    """Return what gives one of the rewards of a configuration.

    Args:
        config: of all rewards.
        name: of the reward in `RewardConfig.by_name`.
        models: the judge models of the run, by the name of their reward.

    Raises:
        ConfigError, UnknownNameError: a function does not exist, or does not take one argument; a template cannot be used.
    """
    reward, key = config.by_name[name], f"reward.functions.{name}" if config.functions else "reward"
    if reward.function == REMOTE:
        return RemoteScorer(reward, f"{key}.remote")
    if reward.function == JUDGE:
        return JudgeScorer(reward, f"{key}.judge", models.get(name))
    return FunctionScorer(reward)


def make_grader(config: RewardConfig, models: Mapping[str, ChatEndpoint] = MappingProxyType({})) -> RewardGrader | None:
    """Return the grader of a configuration, or None if the environment's reward is kept; see `make_scorer`."""
    return RewardGrader(config, models) if config.by_name else None


def check_reward(config: Config, *, needs_reward: bool) -> None:
    """Check the reward section before anything is started.

    Args:
        config: the run's configuration.
        needs_reward: whether the environment sets no reward.

    Raises:
        ConfigError, UnknownNameError: a function is needed and missing, or cannot be used.
    """
    reward, data = config.reward, config.data
    if needs_reward and all(term.function == ENVIRONMENT for term in reward.by_name.values()):
        player = config.rollout.agent.setting or f"env.name={config.env.name}"
        raise ConfigError(
            f"{player} sets no reward: set reward.function to my_rewards.py:score, "
            f"module:function, or one that is built in: {', '.join(names(REWARDS))}, {REMOTE}, {JUDGE}"
        )
    make_grader(reward)
    from_files = data.path is not None or data.eval_path is not None
    for term in reward.by_name.values():
        if from_files and data.label_key is None and _reads_label(term):
            raise ConfigError(
                f"reward.function={term.function} compares with the right answer: set data.label_key to its column"
            )


def _reads_label(term: RewardFunctionConfig) -> bool:
    if term.judge is not None:
        return term.judge.reads_label
    return term.function in names(REWARDS) and reward_function(term.function) not in builtin.WITHOUT_LABEL


def label_warning(reward: RewardConfig, data: DataConfig) -> str:
    """Return a warning if the user's function reads ``sample.label``, and no column of the data files is the label; else ""."""
    from_files = data.path is not None or data.eval_path is not None
    if not from_files or data.label_key is not None:
        return ""
    for name in _function_names(reward):
        code = getattr(inspect.unwrap(reward_function(name)), "__code__", None)
        if name not in names(REWARDS) and code is not None and "label" in code.co_names:
            return f"warning: reward.function={name} reads the label, which is None: set data.label_key to its column"
    return ""


def _function_names(reward: RewardConfig) -> list[str]:
    return [term.function for term in reward.by_name.values() if term.function not in (None, REMOTE, JUDGE)]


def reward_tools(reward: RewardConfig) -> tuple[str, ...]:
    """Return the registered tools that reward functions call: their attributes ``tool_names``."""
    named = (getattr(reward_function(name), "tool_names", ()) for name in _function_names(reward))
    return tuple(name for tool_names in named for name in tool_names)


def check_labels(reward: RewardConfig, tasks: Iterable[Task]) -> None:
    """Check that reward functions of agentrl can compare with the answers of tasks.

    Raises:
        ConfigError: an answer is none that the function compares with.
    """
    functions = {name: reward_function(name) for name in _function_names(reward) if name in names(REWARDS)}
    builtins = {name: function for name, function in functions.items() if function.__module__ == builtin.__name__}
    judges = {
        name: term.judge for name, term in reward.by_name.items() if term.judge is not None and term.judge.reads_label
    }
    for task in tasks if builtins or judges else ():
        for name, function in builtins.items():
            try:
                builtin.check_task(function, task.answer, task.metadata, task.id)
            except ValueError as error:
                raise ConfigError(f"reward.function={name}: {error}") from None
        for name, judge in judges.items():
            try:
                builtin.check_label(task.answer, task.id)
            except ValueError as error:
                raise ConfigError(f"the judge {name} with mode={judge.mode}: {error}") from None


def _sample_excerpt(rollouts: Sequence[Rollout]) -> str:
    first = Sample.from_rollout(rollouts[0])
    others_text = f" and {len(rollouts) - 1} others of its group" if len(rollouts) > 1 else ""
    return (
        f"sample    {first.rollout_id} of task {first.prompt_id}{others_text}\n"
        f"prompt    {short_text(first.prompt)}\nresponse  {short_text(first.response)}\nlabel     {short_text(first.label)}"
    )
