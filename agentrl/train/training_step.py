"""A training step: rollouts to advantages, to the batches of optimizer steps, to metrics. Legend: ``N`` rollouts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RowAdvantages, RunEstimators
from agentrl.algo.registry import compares_groups, needs_critic
from agentrl.batch.groups import RolloutGroups, group_rollouts, groups_by_policy, groups_by_source
from agentrl.batch.loss_weights import count_units
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import WHOLE_STEP, RowSignals, StepPart, pack
from agentrl.batch.provenance import check_graded
from agentrl.batch.sample_conversion import ConvertedSamples, convert_samples
from agentrl.batch.sequences import RowValues
from agentrl.core.callback import OptimizerBatch
from agentrl.core.errors import LearnerError
from agentrl.core.training_sample import ConvertSamples
from agentrl.core.types import Rollout, Row, RowKey
from agentrl.evaluation.intervals import mean
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.viewer.terminal import rollout_panel
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.callbacks import RunCallbacks
from agentrl.train.rollout_source import RolloutSource, StepRollouts, TaskPosition
from agentrl.train.step_metrics import (
    live_share,
    merge_metrics,
    policy_metrics,
    rollout_metrics,
    source_metrics,
    taught_groups,
    value_metrics,
)
from agentrl.train.step_scores import StepScores, StepSettings, score_rollouts
from agentrl.train.teachers import Teachers

_TRAINED = "batch/trained_tokens"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Rollouts of one of the optimizer steps of a training step."""

    counted: set[str]
    """Ids of the rollouts whose rows count in the denominators of the loss."""
    trained: set[str]
    """Ids of the rollouts whose rows are trained; not empty, and among those that count."""
    policy: str = "main"
    """The policy that is trained, if there are several; all rows belong to it."""
    index: int = 0
    """Index among the optimizer steps of this policy in the training step."""


@dataclass
class TrainingStep:
    """The rollouts of a training step, and what is computed from them on the driver."""

    settings: StepSettings
    estimators: RunEstimators
    """The estimators, with their state before the step."""
    step: int
    """Number of training steps finished before this one."""
    rollouts: Sequence[Rollout]
    """All rollouts of the step, dropped ones included."""
    scores: StepScores = field(default_factory=StepScores)
    """Scores of the rollouts that were not dropped. Set before advantages and batches are read."""
    progress: float = 0.0
    """`RolloutSource.progress` before the step."""
    converted: ConvertedSamples | None = None
    """What ``batch.convert`` has made of the rollouts; None without it."""

    @cached_property
    def groups(self) -> RolloutGroups:
        """The rollouts that were not dropped, by task.

        Raises:
            UngradedError: see `check_graded`.
        """
        if self.settings.algo.needs_reward:
            check_graded(self.rollouts)
        return self.sampled_groups if self.converted is None else group_rollouts(self.converted.rollouts)

    @cached_property
    def sampled_groups(self) -> RolloutGroups:
        """The rollouts that were not dropped, by task, before ``batch.convert``."""
        return group_rollouts(self.rollouts)

    @cached_property
    def shaped_groups(self) -> RolloutGroups:
        """`groups` with the rewards that advantages are computed from.

        Raises:
            ConfigError: see `RunEstimators.shape_rewards` and `groups_by_source`.
        """
        rollouts = {
            rollout.rollout_id: rollout
            for source, source_groups in groups_by_source(self.groups, self.settings.packing.sources).items()
            for groups in groups_by_policy(source_groups).values()
            for rollout in self.estimators.shape_rewards(source, groups).rollouts_N
        }
        return replace(
            self.groups, rollouts_N=tuple(rollouts[rollout.rollout_id] for rollout in self.groups.rollouts_N)
        )

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
        for source, source_groups in groups_by_source(self.shaped_groups, self.settings.packing.sources).items():
            for groups in groups_by_policy(source_groups).values():
                yield source, self._advantage_input(groups)

    def _advantage_input(self, groups: RolloutGroups) -> AdvantageInput:
        penalties = self.scores.kl_penalties(self.settings.algo, groups)
        if self.converted is not None and self.converted.rewards:
            rewards = self.converted.rewards
            penalties = {row.key: penalties.get(row.key, np.float32(0)) - rewards[row.key] for row in groups.rows}
        return AdvantageInput(groups, kl=penalties, values=self.scores.values)

    def optimizer_steps(self) -> list[OptimizerStep]:
        """Divide the rollouts among ``train.steps_per_rollout`` optimizer steps; empty steps are left out.

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
        ids_by_group: list[list[str]] = [[] for _ in groups.prompt_ids_G]
        for rollout, group in zip(groups.rollouts_N, groups.groups_N.tolist(), strict=True):
            ids_by_group[group].append(rollout.rollout_id)
        for numbers in np.array_split(np.arange(len(ids_by_group)), self.settings.config.train.steps_per_rollout):
            yield {rollout_id for group in numbers.tolist() for rollout_id in ids_by_group[group]}

    @cached_property
    def signals(self) -> RowSignals:
        """What the policy is trained on besides tokens."""
        return RowSignals(
            advantages=self.advantages,
            learner_logprobs=self.scores.learner or None,
            correction=self.scores.correction(self.settings.algo.correction, self.groups),
            weights=None if self.converted is None else self.converted.weights,
            images=self.groups.images,
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
        counted = optimizer_step.counted.difference(computed)
        return pack(
            [row for row in self.groups.rows if row.key.rollout_id in counted],
            self.settings.packing,
            self.signals,
            policy=optimizer_step.policy,
            trained=optimizer_step.trained,
            step_part=step_part,
            lr_scale=self.settings.policy_lr_scale(self.step, optimizer_step.index, self.progress),
        )

    @cached_property
    def returns(self) -> RowValues:
        """What the critic learns to predict for every trained token of sources whose estimator has a critic."""
        returns: dict[RowKey, NDArray[np.float32]] = {}
        for source, groups in groups_by_source(self.shaped_groups, self.settings.packing.sources).items():
            if needs_critic(self.settings.algo_by_source[source]):
                returns |= self.estimators.returns(source, self._advantage_input(groups))
        return returns

    def value_batches(self) -> list[GlobalBatch]:
        """Return the batches of the critic's optimizer steps; rollouts are divided among them as among those of the policy.

        Rollouts without an advantage are trained on too.
        """
        weights = None if self.converted is None else self.converted.weights
        signals = RowSignals(
            values=self.scores.values, returns=self.returns, weights=weights, images=self.groups.images
        )
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
                lr_scale=self.settings.critic_lr_scale(self.step, index, self.progress),
            )
            for index, rows in enumerate(trained_rows)
        ]

    def metrics(self, sampled_s: float | None, filtered: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of rollouts and advantages, of each source too, and of distillation.

        Args:
            sampled_s: seconds in which all rollouts were sampled; None if they were recorded earlier.
            filtered: rollouts of groups that ``rollout.filter_groups`` dropped.
        """
        filtered_ids = {rollout.prompt_id for rollout in filtered}
        return (
            rollout_metrics(self.rollouts, self.sampled_groups, sampled_s)
            | self._shaping_metrics()
            | {"batch/live_share": live_share(self.groups, self.advantages)}
            | {"train/taught_groups": taught_groups(self.advantages, self.groups, filtered_ids)}
            | source_metrics(self.settings.packing.sources, self.rollouts, self.advantages)
            | self.scores.distillation_metrics(self.settings.algo, self.groups)
        )

    def _shaping_metrics(self) -> dict[str, float]:
        """Return metrics of the user's functions on samples and rewards; empty without any."""
        metrics = {} if self.converted is None else dict(self.converted.metrics)
        if any(algo.reward_post_process is not None for algo in self.settings.algo_by_source.values()):
            metrics["train/processed_reward"] = mean([rollout.reward for rollout in self.shaped_groups.rollouts_N])
        return metrics

    def value_metrics(self, optimizer_steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the critic's metrics of the step, from those of its optimizer steps."""
        return value_metrics(optimizer_steps, self.groups, self.scores.values, self.returns)

    def why_untrained(self) -> str:
        """Return why the step has no optimizer step, with the key to change."""
        config, groups = self.settings.config, self.groups
        if self.converted is not None and self.sampled_groups.rollouts_N and not groups.rollouts_N:
            return f"batch.convert={config.batch.convert} left out all {len(self.sampled_groups.rollouts_N)} samples"
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


@dataclass(slots=True)
class EarlyGroups:
    """Computes groups of a step before its batch is full, while others are sampled (``async.streaming``).

    Their gradient is added up. The batch of the remaining groups completes the optimizer step.
    How many tokens, sequences or rollouts share the loss is known only when the batch is full: until then weights are not
    divided by it, and the whole gradient is scaled at the end.
    """

    settings: StepSettings
    estimators: RunEstimators
    learner: LearnerGroup
    step: int
    """Number of training steps finished before this one."""
    scores: StepScores = field(default_factory=StepScores)
    """Scores of the rollouts that were computed."""
    _waiting: list[Rollout] = field(default_factory=list)
    """Rollouts that are too few for a micro-batch of each rank."""
    _waiting_tokens: int = 0
    _computed: set[str] = field(default_factory=set)
    """Ids of the rollouts that were computed."""
    _batch_metrics: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of their batches."""
    _seconds: float = 0.0
    _token_share: float = 0.0

    async def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished groups of the step, and compute the gradient of all that wait if they fill micro-batches.

        Raises:
            LearnerError, ProvenanceError: see `LearnerGroup.train_step`.
        """
        self._waiting += rollouts
        self._waiting_tokens += sum(len(row.token_ids) for rollout in rollouts for row in rollout.rows)
        packing = self.settings.packing
        if self._waiting_tokens >= packing.tokens_per_micro * packing.data_parallel_size:
            ready, self._waiting, self._waiting_tokens = self._waiting, [], 0
            with waiting(PHASE, f"step {self.step + 1}", "train"):
                await asyncio.to_thread(self._compute, ready)

    def _compute(self, rollouts: Sequence[Rollout]) -> None:
        start, early_step = time.perf_counter(), TrainingStep(self.settings, self.estimators, self.step, rollouts)
        if self.settings.needs_scores and early_step.groups.rollouts_N:
            self.scores = self.scores.merge(score_rollouts(self.settings, early_step.groups, self.learner))
        early_step.scores = self.scores
        for optimizer_step in early_step.optimizer_steps():
            batch = early_step.policy_batch(optimizer_step, StepPart(units=1, completes=False))
            if self.learner.train_step(batch):
                raise LearnerError(
                    "the learner took an optimizer step for a part of a batch: it ignores `GlobalBatch.completes`; set "
                    "async.streaming=false"
                )
            self._batch_metrics.append(batch.metrics)
        self._computed.update(rollout.rollout_id for rollout in rollouts)
        self._seconds += time.perf_counter() - start

    def remaining(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts that were not computed."""
        return [rollout for rollout in rollouts if rollout.rollout_id not in self._computed]

    def last_batch(self, training_step: TrainingStep, optimizer_step: OptimizerStep) -> GlobalBatch:
        """Return the batch that completes an optimizer step, with the rows that were not computed."""
        units = count_units(training_step.rows(optimizer_step.counted), self.settings.packing.aggregation)
        batch = training_step.policy_batch(optimizer_step, StepPart(units=1, gradient_scale=1 / units), self._computed)
        early_tokens = sum(metrics[_TRAINED] for metrics in self._batch_metrics)
        metrics = merge_metrics([*self._batch_metrics, batch.metrics])
        del metrics["train/optimizer_steps"]
        self._token_share = early_tokens / max(1.0, metrics[_TRAINED])
        return replace(batch, metrics=metrics)

    def metrics(self) -> dict[str, float]:
        """Return the share of the trained tokens that were computed early, and the seconds that this took."""
        return {"async/early_share": self._token_share, "time/early_s": self._seconds}


@dataclass(slots=True)
class StepTrainer:
    """Takes training steps: rollouts, scores before the first optimizer step, optimizer steps of critic and policy."""

    settings: StepSettings
    source: RolloutSource
    learner: LearnerGroup
    estimators: RunEstimators
    view: ProgressView
    critic: CriticGroup | None = None
    """Predicts values, if the estimator needs them."""
    teachers: Teachers | None = None
    """The teachers of on-policy distillation."""
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    """Callbacks of the run."""
    convert: ConvertSamples | None = None
    """The function of ``batch.convert``."""
    optimizer_steps: int = field(default=0, init=False)
    """Optimizer steps that learner and critic have taken in the unfinished training step."""

    async def train(
        self, step: int, position: TaskPosition, watch: Stopwatch
    ) -> tuple[TrainingStep, StepRollouts, dict[str, float]] | None:
        """Take the optimizer steps of a training step; `finish` follows.

        Returns:
            the step, its rollouts as the source supplied them, and metrics of the optimizer steps; None if no tasks are left.
        """
        name = f"step {step + 1}"
        streams = self.settings.config.asynchronous.streaming
        early = EarlyGroups(self.settings, self.estimators, self.learner, step) if streams else None
        progress = self.source.progress
        self.view.phase("rollout")
        with watch("rollout"), waiting(PHASE, name, "rollout"):
            rollouts = await self.source.get_rollouts(step + 1, position, early.add if early else None)
        if rollouts is None:
            return None
        self.view.phase("learn")
        with watch("record"):
            if step == 0:
                self._show_best(rollouts.rollouts)
            await self.callbacks.on_rollouts(rollouts.rollouts)
        training_step = TrainingStep(self.settings, self.estimators, step, rollouts.rollouts, progress=progress)
        if self.convert is not None:
            with watch("pack"):
                training_step.converted = await asyncio.to_thread(self._convert, self.convert, rollouts.rollouts)
        training_step.scores = await self._score(training_step, early, watch)

        def make_batches(training_step: TrainingStep) -> list[GlobalBatch]:
            alone = self.settings.trains_critic_alone(step)
            optimizer_steps = [] if alone else training_step.optimizer_steps()
            make_batch = training_step.policy_batch if early is None else partial(early.last_batch, training_step)
            return [make_batch(optimizer_step) for optimizer_step in optimizer_steps]

        with watch("pack"):
            batches = await asyncio.to_thread(make_batches, training_step)  # episodes may run meanwhile
        metrics: dict[str, float] = {}
        if batches or training_step.scores.values:
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("train"), waiting(PHASE, name, "train"):
                metrics = await self._train_critic(training_step)
                trained: list[Mapping[str, float]] = []
                for index, batch in enumerate(batches):
                    await self.callbacks.on_batch(
                        OptimizerBatch(step + 1, index, len(batches), batch.policy, batch.lr_scale, batch.metrics)
                    )
                    trained.append({**batch.metrics, **await asyncio.to_thread(self.learner.train_step, batch)})
                    self.optimizer_steps += 1
            if trained:
                with watch("record"):
                    metrics |= merge_metrics(trained) | policy_metrics([batch.policy for batch in batches], trained)
        metrics = metrics or {"train/skipped": 1.0}
        return training_step, rollouts, metrics if early is None else metrics | early.metrics()

    def _convert(self, convert: ConvertSamples, rollouts: Sequence[Rollout]) -> ConvertedSamples:
        if self.settings.algo.needs_reward:
            check_graded(rollouts)
        return convert_samples(convert, str(self.settings.config.batch.convert), rollouts)

    async def _score(self, training_step: TrainingStep, early: EarlyGroups | None, watch: Stopwatch) -> StepScores:
        """Return the scores of the rollouts before the first optimizer step: the learner's, then the teachers'."""
        with watch("pack"):
            groups = training_step.groups if early is None else group_rollouts(early.remaining(training_step.rollouts))
        scores, name = StepScores(), f"step {training_step.step + 1}"
        if groups.rollouts_N and self.settings.needs_scores:
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("score"), waiting(PHASE, name, "scores"):
                scores = await asyncio.to_thread(score_rollouts, self.settings, groups, self.learner, self.critic)
        if groups.rollouts_N and self.teachers is not None:
            if self.teachers.need_learner:
                await self.source.release_gpus_for_training(self.learner, watch)
            with watch("teachers"), waiting(PHASE, name, "teachers"):
                logprobs = await self.teachers.score(groups, self.learner, self.settings.packing)
            scores = replace(scores, teachers=logprobs)
        return scores if early is None else early.scores.merge(scores)

    async def _train_critic(self, training_step: TrainingStep) -> dict[str, float]:
        """Take the critic's optimizer steps, and return their metrics; none without a critic."""
        if self.critic is None or not training_step.scores.values:
            return {}
        trained = []
        for batch in await asyncio.to_thread(training_step.value_batches):
            trained.append(await asyncio.to_thread(self.critic.train_step, batch))
            self.optimizer_steps += 1
        return await asyncio.to_thread(training_step.value_metrics, trained)

    async def finish(self, training_step: TrainingStep, watch: Stopwatch) -> None:
        """Update the estimators after the optimizer steps, and every ``algo.reference_steps`` steps the reference."""
        self.optimizer_steps, steps = 0, self.settings.algo.reference_steps
        with watch("train"):
            self.estimators.update(training_step.advantage_inputs())
        if steps and (training_step.step + 1) % steps == 0:
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("train"):
                await asyncio.to_thread(self.learner.update_reference)

    def _show_best(self, rollouts: Sequence[Rollout]) -> None:
        if rollouts:
            best = max(rollouts, key=lambda rollout: (rollout.reward, len(rollout.turns)))
            self.view.note(rollout_panel(best, f"a rollout of step 1, task {best.prompt_id}", self.source.decode))
