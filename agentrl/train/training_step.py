"""A training step: rollouts to advantages, to the batches of optimizer steps, to metrics. Legend: ``N`` rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RowAdvantages, RunEstimators
from agentrl.algo.registry import compares_groups, needs_critic
from agentrl.batch.groups import RolloutGroups, group_rollouts, groups_by_policy, groups_by_source
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import WHOLE_STEP, RowSignals, StepPart, pack
from agentrl.batch.sequences import RowValues
from agentrl.core.types import Rollout, Row, RowKey
from agentrl.train.step_metrics import live_share, rollout_metrics, source_metrics, value_metrics
from agentrl.train.step_scores import StepScores
from agentrl.train.step_settings import StepSettings


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Rollouts of one of the optimizer steps of a training step."""

    counted: set[str]
    """Ids of the rollouts whose rows count in the denominators of the loss."""
    trained: set[str]
    """Ids of the rollouts whose rows are trained; not empty, and among those that count."""
    policy: str = "main"
    """Which of several policies is trained; all rows are of this one."""
    index: int = 0
    """Of the optimizer steps of this policy in the training step."""


@dataclass
class TrainingStep:
    """The rollouts of a training step, and what is computed from them on the driver."""

    settings: StepSettings
    estimators: RunEstimators
    """With their state before the step."""
    step: int
    """Training steps that were finished before."""
    rollouts: Sequence[Rollout]
    """All of the step, dropped ones included."""
    scores: StepScores = field(default_factory=StepScores)
    """Of the rollouts that were not dropped. Set before advantages and batches are read."""

    @cached_property
    def groups(self) -> RolloutGroups:
        """The rollouts that were not dropped, by task."""
        return group_rollouts(self.rollouts)

    @cached_property
    def advantages(self) -> RowAdvantages:
        """The advantage of every trained token, by the estimator of its source. Policies are not compared with each other.

        Raises:
            ConfigError: see `RunEstimators.advantages` and `groups_by_source`.
        """
        gaps = self.scores.teacher_gaps(self.settings.algo, self.groups)
        advantages: RowAdvantages = {}
        for source, inputs in self.advantage_inputs():
            advantages |= self.estimators.advantages(source, inputs, gaps)
        return advantages

    def advantage_inputs(self) -> Iterator[tuple[str, AdvantageInput]]:
        """Yield what the estimator of each source gets, one policy after the other."""
        for source, source_groups in groups_by_source(self.groups, self.settings.packing.sources).items():
            for groups in groups_by_policy(source_groups).values():
                yield source, self._advantage_input(groups)

    def _advantage_input(self, groups: RolloutGroups) -> AdvantageInput:
        return AdvantageInput(
            groups, kl=self.scores.kl_penalties(self.settings.algo, groups), values=self.scores.values
        )

    def optimizer_steps(self) -> list[OptimizerStep]:
        """Divide the rollouts among ``train.steps_per_rollout`` optimizer steps; an empty one is left out.

        Groups stay whole: each optimizer step gets the same number of groups, or one more. Rollouts without an advantage,
        such as those of groups whose rewards are all equal, add nothing to the gradient and are left out; whether they count
        in the denominators is ``batch.denominator`` (``live`` is DAPO's filter, arXiv:2503.14476, without sampling
        replacements). They stay if the loss has a KL term or an entropy bonus, to which they contribute. Rollouts without a
        token to train on are left out. Each policy of several has separate optimizer steps.
        """
        config = self.settings.config
        live = {
            key.rollout_id
            for key, advantages_T in self.advantages.items()
            if config.algo.trains_everything or advantages_T.any()
        }
        steps = []
        for policy, groups in groups_by_policy(self.groups).items():
            with_tokens = {row.key.rollout_id for row in groups.rows if row.mask.any()}
            index = 0
            for rollout_ids in self._split(groups):
                trained = rollout_ids & with_tokens & live
                if trained:
                    counted = rollout_ids if config.batch.denominator == "all" else trained
                    steps.append(OptimizerStep(counted, trained, policy, index))
                    index += 1
        return steps

    def rows(self, rollout_ids: Collection[str]) -> list[Row]:
        """Return the rows of rollouts."""
        return [row for row in self.groups.rows if row.key.rollout_id in rollout_ids]

    def _split(self, groups: RolloutGroups) -> Iterator[set[str]]:
        """Yield the ids of the rollouts of each of ``train.steps_per_rollout`` optimizer steps, whole groups."""
        numbers = np.arange(len(groups.prompt_ids_G))
        for chosen in np.array_split(numbers, self.settings.config.train.steps_per_rollout):
            yield {
                rollout.rollout_id
                for rollout, number in zip(groups.rollouts_N, groups.groups_N, strict=True)
                if number in chosen
            }

    @cached_property
    def signals(self) -> RowSignals:
        """What the policy is trained on beside tokens."""
        return RowSignals(
            advantages=self.advantages,
            learner_logprobs=self.scores.learner or None,
            correction=self.scores.correction(self.settings.algo.correction, self.groups),
        )

    def policy_batch(
        self, optimizer_step: OptimizerStep, step_part: StepPart = WHOLE_STEP, computed: Collection[str] = ()
    ) -> GlobalBatch:
        """Return the batch of an optimizer step of the policy, or a part of it.

        Args:
            optimizer_step: of this training step.
            step_part: which part of it the batch is.
            computed: ids of rollouts that are left out, as other parts have them.
        """
        return pack(
            [row for row in self.groups.rows if row.key.rollout_id in optimizer_step.counted.difference(computed)],
            self.settings.packing,
            self.signals,
            policy=optimizer_step.policy,
            trained=optimizer_step.trained,
            step_part=step_part,
            lr_scale=self.settings.policy_lr_scale(self.step, optimizer_step.index),
        )

    @cached_property
    def returns(self) -> RowValues:
        """What the critic learns to predict for every trained token of sources whose estimator has a critic."""
        returns: dict[RowKey, NDArray[np.float32]] = {}
        for source, groups in groups_by_source(self.groups, self.settings.packing.sources).items():
            if needs_critic(self.settings.algo_by_source[source]):
                returns |= self.estimators.returns(source, self._advantage_input(groups))
        return returns

    def value_batches(self) -> list[GlobalBatch]:
        """Return the batches of the critic's optimizer steps, among which rollouts are divided as among those of the policy.

        Rollouts without an advantage are trained on too.
        """
        signals = RowSignals(values=self.scores.values, returns=self.returns)
        rows_by_step = [
            [row for row in self.rows(rollout_ids) if row.key in self.returns]
            for rollout_ids in self._split(self.groups)
        ]
        trained_rows = [rows for rows in rows_by_step if any(row.mask.any() for row in rows)]
        return [
            pack(
                rows,
                self.settings.packing,
                signals,
                kind="value",
                lr_scale=self.settings.critic_lr_scale(self.step, index),
            )
            for index, rows in enumerate(trained_rows)
        ]

    def metrics(self, sampled_s: float | None) -> dict[str, float]:
        """Return the metrics of rollouts and advantages, of each source too, and of distillation.

        Args:
            sampled_s: seconds in which all rollouts were sampled; None if they were recorded earlier.
        """
        return (
            rollout_metrics(self.rollouts, self.groups, sampled_s)
            | {"batch/live_share": live_share(self.groups, self.advantages)}
            | source_metrics(self.settings.packing.sources, self.rollouts, self.advantages)
            | self.scores.distillation_metrics(self.settings.algo, self.groups)
        )

    def value_metrics(self, optimizer_steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the critic's metrics of the step, from those of its optimizer steps."""
        return value_metrics(optimizer_steps, self.groups, self.scores.values, self.returns)

    def why_untrained(self) -> str:
        """Return why the step has no optimizer step, with the key to change."""
        config, groups = self.settings.config, self.groups
        if not groups.rollouts_N:
            failures = [rollout.failure for rollout in self.rollouts if rollout.failure is not None]
            kinds = Counter(failure.kind for failure in failures)
            counts = ", ".join(f"{kind.value} {count}" for kind, count in kinds.items())
            first = f" (failures: {counts}; the first: {failures[0].error}: {failures[0].message})" if failures else ""
            return f"all {len(self.rollouts)} episodes were dropped{first}; rollout.failure sets what follows a failure"
        if not config.algo.needs_reward:
            return "every sampled token has the probability that its teachers give it (algo.distillation.teachers)"
        if config.rollout.n_samples_per_prompt == 1 and compares_groups(config.algo):
            return (
                "rollout.n_samples_per_prompt=1, but an advantage compares the rewards of a task's rollouts; "
                "set rollout.n_samples_per_prompt to 4 or more"
            )
        if groups.flat_share == 1:
            rewards_N = groups.rewards_N
            return (
                f"the rollouts of each task have equal rewards (from {rewards_N.min():g} to {rewards_N.max():g} over "
                f"{len(groups.prompt_ids_G)} tasks, {groups.dropped} of {len(self.rollouts)} episodes dropped), so no advantage "
                "is left; raise rollout.n_samples_per_prompt or sampler.temperature, take tasks that the policy sometimes "
                "solves, or replace such groups (rollout.filter_groups.filters=[zero_variance])"
            )
        return "no rollout with an advantage has a token to train on"
