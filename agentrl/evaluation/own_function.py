"""Evaluation by a function of the user (``eval.function``), in place of the sets of the section ``eval`` or with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from agentrl.config.evaluation import EvalConfig, EvalSet
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact
from agentrl.core.errors import ConfigError
from agentrl.core.imports import load_function
from agentrl.core.policy_evaluation import EvaluatePolicy, PolicyEvaluation
from agentrl.core.task import Task
from agentrl.core.types import Rollout
from agentrl.core.user_code import await_user_code, calling
from agentrl.episode.runner import GroupRunner
from agentrl.evaluation.evaluate import OnDone, SetResult, evaluate, flat_metrics
from agentrl.evaluation.sets import EvalTasks
from agentrl.obs.waiting import waiting

KEY = "eval.function"


def load_evaluation(config: EvalConfig) -> EvaluatePolicy | None:
    """Return the function that ``eval.function`` names, or None without one.

    Raises:
        ConfigError: it does not exist, or is no coroutine function of one argument.
    """
    return None if config.function is None else load_function(config.function, KEY, "policy", is_async=True)


@dataclass
class EnginePolicy(PolicyEvaluation):
    """A policy that engines serve."""

    plan: EvalSet
    """Sampling parameters by default."""
    sets: Sequence[EvalTasks]
    runner: GroupRunner
    on_done: OnDone | None
    """Called with each rollout."""
    results: list[SetResult] = field(default_factory=list)
    """Results of `run_sets`."""
    _calls: int = 0

    @override
    async def run_sets(self) -> Mapping[str, float]:
        if self.results or not self.sets:
            fault = "was called before" if self.results else "has no tasks: set eval.split, eval.path or eval.sets"
            raise ConfigError(f"{KEY}: run_sets {fault}")
        self.results = await evaluate(self.sets, self.runner, self.on_done)
        return flat_metrics(self.results)

    @override
    async def rollouts(
        self,
        tasks: Sequence[Task],
        *,
        n_samples: int = 1,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
    ) -> Sequence[Rollout]:
        ids = Counter(task.id for task in tasks)
        if not tasks or max(ids.values()) > 1:
            fault = f"several with the id {max(ids, key=lambda name: ids[name])!r}" if tasks else "no tasks"
            raise ConfigError(f"{KEY}: rollouts() got {fault}; n_samples says how often a task is played")
        changes = {
            "n_samples": n_samples,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "max_new_tokens": max_new_tokens,
        }
        settings = {key: value for key, value in changes.items() if value is not None}
        plan = EvalSet.model_validate(self.plan.model_dump() | settings)
        self._calls += 1
        own_set = EvalTasks(f"function.{self._calls}", plan, tasks, KEY)
        if self.sets:
            own_set = replace(own_set, reset_seed=self.sets[0].reset_seed)
        [result] = await evaluate([own_set], self.runner, self.on_done)
        return result.rollouts


def make_policy(
    config: Config, step: int | None, sets: Sequence[EvalTasks], runner: GroupRunner, on_done: OnDone | None
) -> EnginePolicy:
    """Return the policy that a function evaluates."""
    plan = EvalSet.model_validate(config.eval.model_dump(include=set(EvalSet.model_fields)))
    tasks = {eval_set.label: eval_set.tasks for eval_set in sets}
    return EnginePolicy(step, redact(config.model_dump(mode="json", by_alias=True)), tasks, plan, sets, runner, on_done)


async def call_evaluation(
    function: EvaluatePolicy, reference: str, policy: PolicyEvaluation, set_metrics: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of a function, by their full names.

    Args:
        function: of the user.
        reference: ``eval.function``, for messages.
        policy: its argument.
        set_metrics: returns the metrics of `PolicyEvaluation.run_sets`, whose names are taken.

    Raises:
        ConfigError: it raises, or returns no metrics.
    """
    name = f"{KEY}={reference}"

    async def call() -> object:
        work: Awaitable[object] = function(policy)
        return await work

    with calling(name), waiting("evaluation", name):
        returned = await await_user_code(call())
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{name} returned {returned!r:.100}; it must return a mapping of metrics, which may be empty")
    metrics: dict[str, float] = {}
    for key, value in returned.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not isinstance(key, str) or not key or not math.isfinite(number):
            raise ConfigError(f"{name} returned the metric {key!r}={value!r:.100}, which is no finite number")
        full_name = f"eval/{key.removeprefix('eval/')}"
        if set_metrics().get(full_name, number) != number:
            raise ConfigError(f"{name} returned the metric {key!r}, which the sets have already; rename it")
        metrics[full_name] = number
    return metrics
