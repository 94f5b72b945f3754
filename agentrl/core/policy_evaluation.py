"""The contract of evaluation functions (``eval.function``).

::

    async def evaluate(policy):
        metrics = dict(await policy.run_sets())                      # the sets of the section eval
        hard = [task for tasks in policy.tasks.values() for task in tasks if task.metadata["hops"] > 2]
        rollouts = await policy.rollouts(hard, n_samples=16, temperature=0.7)
        return {"best_of_16": mean_of_best(rollouts)}                # logged as eval/best_of_16
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.task import Task
from agentrl.core.types import Rollout


@dataclass
class PolicyEvaluation(ABC):
    """A policy that is evaluated; argument of the function that ``eval.function`` names."""

    step: int | None
    """Training steps of the policy; None in ``agentrl eval``."""
    config: Mapping[str, Any]
    """The configuration as in ``config.yaml``, nested, without secrets; changes have no effect."""
    tasks: Mapping[str, Sequence[Task]]
    """The tasks of each set of the section ``eval``; the set without a name is ``eval``."""

    @abstractmethod
    async def run_sets(self) -> Mapping[str, float]:
        """Evaluate on the sets of the section ``eval``, as without a function, and return their metrics, such as ``eval/reward``.

        They are logged with those that the function returns. May be called once.

        Raises:
            ConfigError: there are no sets, or it was called before.
        """

    @abstractmethod
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
        """Play episodes with the run's environment or loop, and its reward; those of a task are next to each other.

        They are played as those of a set of ``eval``: the same task, sample and policy have the same seeds at each call.

        Args:
            tasks: with different ids; in a mixed run ids begin with the name of a source.
            n_samples: episodes of each task.
            temperature: of sampling; this and the others are by default those of the section ``eval``.
            top_p: nucleus sampling.
            top_k: top-k sampling; -1 keeps all.
            max_new_tokens: most tokens of a turn.
        """


EvaluatePolicy = Callable[[PolicyEvaluation], Awaitable[Mapping[str, float]]]
"""``eval.function``: ``async def evaluate(policy)``; returns finite numbers by name, which are logged as ``eval/NAME``."""
