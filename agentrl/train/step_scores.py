"""What the training steps of a run have in common, and the scores of a step's rollouts before its first optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algo.correction import importance_weights
from agentrl.algo.kl import kl_estimate, teacher_gaps, teacher_metrics
from agentrl.algo.registry import needs_critic
from agentrl.batch.groups import RolloutGroups, groups_by_policy, groups_by_source
from agentrl.batch.lr_schedule import lr_scale
from agentrl.batch.microbatch import Truncation
from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.batch.sequences import RowValues, group_sequences
from agentrl.config.algo import AlgoConfig, CorrectionConfig
from agentrl.config.learner import OptimizerConfig
from agentrl.config.schema import Config
from agentrl.core.types import Row, RowKey
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.registry import make_backend


def pack_options(config: Config, pad_id: int, *models: LearnerGroup | CriticGroup) -> PackOptions:
    """Return how the batches of a run are packed.

    Args:
        config: of the run.
        pad_id: token that fills micro-batches.
        models: learner and critic; prefixes are shared only if all of them can.
    """
    return PackOptions(
        tokens_per_micro=config.batch.micro_tokens,
        data_parallel_size=make_backend(config.learner).data_parallel_size,
        pad_id=pad_id,
        share_prefixes=config.batch.share_prefixes and all(model.shares_prefixes for model in models),
        aggregation=config.batch.aggregation,
        constant_tokens=config.batch.constant_tokens or config.rollout.max_tokens,
        temperature=config.sampler.temperature,
        truncation=Truncation(config.sampler.top_k, config.sampler.top_p)
        if config.sampler.renormalise == "learner"
        else None,
        replays_support=config.sampler.renormalise == "engine",
        provenance=config.train.provenance,
        sources=tuple(config.sources),
    )


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of a run's training steps."""

    config: Config
    packing: PackOptions
    epoch_steps: int | None = None
    """`RolloutSource.epoch_steps`: the length of schedules if the configuration has no ``train.steps``."""

    @property
    def algo(self) -> AlgoConfig:
        """The section ``algo``: common settings; `algo_by_source` has what differs among sources."""
        return self.config.algo

    @property
    def algo_by_source(self) -> Mapping[str, AlgoConfig]:
        """The section ``algo`` of each source of a mixed run; of other runs the only one, by ``""``."""
        return self.config.algo.by_source

    @property
    def needs_learner_logprobs(self) -> bool:
        """Whether log-probabilities of the learner are computed before the first optimizer step of a training step."""
        algo = self.algo
        many_steps = algo.old_logprobs == "learner" and self.config.train.steps_per_rollout > 1
        compares_policies = self.needs_reference_logprobs or bool(algo.distillation.teachers)
        return many_steps or algo.correction.needs_all_tokens or (compares_policies and algo.old_logprobs == "learner")

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether log-probabilities of the reference policy are, as the KL term is in the reward."""
        return self.algo.has_kl and self.algo.kl_in == "reward"

    @property
    def needs_scores(self) -> bool:
        """Whether a training step begins with forward passes over its rollouts."""
        return self.needs_learner_logprobs or self.needs_reference_logprobs or needs_critic(self.algo)

    def trains_critic_alone(self, step: int) -> bool:
        """Return whether the training step after ``step`` finished ones trains only the critic."""
        return needs_critic(self.algo) and step < self.algo.critic.warmup_steps

    def policy_lr_scale(self, step: int, index: int, progress: float = 0.0) -> float:
        """Return the schedule's factor for an optimizer step of the policy, over the training steps that train it.

        Args:
            step: finished training steps.
            index: of the optimizer step in its training step.
            progress: share of the tasks of ``train.epochs`` that were trained or filtered before. With ``train.steps`` too, the
                larger of both shares counts.
        """
        warmup_steps = self.algo.critic.warmup_steps if needs_critic(self.algo) else 0
        return self._lr_scale(self.config.learner.optimizer, step, index, warmup_steps, progress)

    def critic_lr_scale(self, step: int, index: int, progress: float = 0.0) -> float:
        """Return the schedule's factor for an optimizer step of the critic; see `policy_lr_scale`."""
        return self._lr_scale(self.algo.critic.optimizer, step, index, 0, progress)

    def _lr_scale(self, optimizer: OptimizerConfig, step: int, index: int, warmup_steps: int, progress: float) -> float:
        per_step, steps, done = self.config.train.steps_per_rollout, self.config.train.steps, float(step)
        if steps is None:
            assert self.epoch_steps is not None, "a configuration has train.steps or train.epochs"
            steps, done = self.epoch_steps, 0.0
        total = (steps - warmup_steps) * per_step
        done = max(done, progress * steps) - warmup_steps
        return lr_scale(optimizer, (done * per_step + index) / total, total, "constant")


@dataclass(frozen=True, slots=True)
class StepScores:
    """Scores of tokens by row; empty if a run does not need them."""

    learner: RowValues = field(default_factory=dict)
    """Log-probabilities of the learner."""
    reference: RowValues = field(default_factory=dict)
    """Log-probabilities of the reference policy, if the KL term is in the reward."""
    values: RowValues = field(default_factory=dict)
    """The critic's values."""
    teachers: Mapping[str, RowValues] = field(default_factory=dict)
    """Log-probabilities of teachers by name, of the rows that each scores."""

    def merge(self, scores: StepScores) -> StepScores:
        """Return these and the scores of other rollouts. Neither has those of a critic or of teachers."""
        return StepScores({**self.learner, **scores.learner}, {**self.reference, **scores.reference})

    def policy_logprobs(self, row: Row) -> NDArray[np.float32]:
        """Return the policy's log-probabilities of a row: the learner's if they were computed, else the engine's."""
        return np.asarray(self.learner.get(row.key, row.logprobs), np.float32)

    def teacher_gaps(self, algo: AlgoConfig, groups: RolloutGroups) -> RowValues | None:
        """Return the log-probability gap to the teachers of every token; None without teachers."""
        if not self.teachers:
            return None
        weights = {name: teacher.weight for name, teacher in algo.distillation.teachers.items()}
        return teacher_gaps(groups.rows, self._policy_by_row(groups), self.teachers, weights)

    def distillation_metrics(self, algo: AlgoConfig, groups: RolloutGroups) -> dict[str, float]:
        """Return the mean divergence from the teachers, if there are any."""
        gaps = self.teacher_gaps(algo, groups)
        return {} if gaps is None else teacher_metrics(groups.rows, self._policy_by_row(groups), self.teachers, gaps)

    def _policy_by_row(self, groups: RolloutGroups) -> dict[RowKey, NDArray[np.float32]]:
        return {row.key: self.policy_logprobs(row) for row in groups.rows}

    def kl_penalties(self, algo: AlgoConfig, groups: RolloutGroups) -> dict[RowKey, NDArray[np.float32]]:
        """Return ``kl_coef`` times the KL estimate of each sampled token, if it belongs to the reward."""
        penalties = {}
        for row in groups.rows if self.reference else ():
            if row.key in self.reference:
                policy_T = torch.from_numpy(self.policy_logprobs(row))
                reference_T = torch.from_numpy(self.reference[row.key])
                kl_T = kl_estimate(policy_T, reference_T, algo.kl_kind)
                penalties[row.key] = np.asarray(algo.kl_coef * kl_T.numpy(), np.float32)
        return penalties

    def correction(self, config: CorrectionConfig, groups: RolloutGroups) -> RowValues | None:
        """Return the importance weight of every trained token, if they need more than each token alone.

        See `agentrl.algo.correction`. Policies of a run are corrected separately.
        """
        if not config.needs_all_tokens:
            return None
        return {
            key: weights_T
            for policy_groups in groups_by_policy(groups).values()
            for key, weights_T in self._importance_weights(config, policy_groups).items()
        }

    def _importance_weights(self, config: CorrectionConfig, groups: RolloutGroups) -> RowValues:
        sequences = [sequence for sequence in group_sequences(groups.rows) if sequence.size]
        if not sequences:
            return {}
        log_ratios = [
            sequence.gather(self.learner) - sequence.gather({row.key: row.logprobs for row in sequence.rows})
            for sequence in sequences
        ]
        sizes = [len(log_ratio_S) for log_ratio_S in log_ratios]
        sequence_N = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
        weights_N = importance_weights(torch.from_numpy(np.concatenate(log_ratios)), sequence_N, config).numpy()
        weights_by_sequence = np.split(weights_N, np.cumsum(sizes)[:-1])
        return {
            key: weights_T
            for sequence, weights_S in zip(sequences, weights_by_sequence, strict=True)
            for key, weights_T in sequence.scatter(weights_S).items()
        }


def score_rollouts(
    settings: StepSettings, groups: RolloutGroups, learner: LearnerGroup, critic: CriticGroup | None = None
) -> StepScores:
    """Compute what advantages, loss and correction need of all rollouts, but for teachers. Blocks.

    Raises:
        LearnerError: a rank failed.
    """
    learner_logprobs: dict[RowKey, NDArray[np.float32]] = {}
    reference_logprobs: dict[RowKey, NDArray[np.float32]] = {}
    if settings.needs_learner_logprobs or settings.needs_reference_logprobs:
        for policy, policy_groups in groups_by_policy(groups).items():
            batch = pack(policy_groups.rows, settings.packing, RowSignals(images=policy_groups.images), policy=policy)
            if settings.needs_learner_logprobs:
                learner_logprobs |= learner.logprobs(batch)
            if settings.needs_reference_logprobs:
                reference_logprobs |= learner.logprobs(batch, "reference")
    values = {} if critic is None else _critic_values(settings, groups, critic)
    return StepScores(learner_logprobs, reference_logprobs, values)


def _critic_values(settings: StepSettings, groups: RolloutGroups, critic: CriticGroup) -> RowValues:
    """Return the critic's values of the rollouts whose estimator needs them."""
    rows = [
        row
        for source, source_groups in groups_by_source(groups, settings.packing.sources).items()
        if needs_critic(settings.algo_by_source[source])
        for row in source_groups.rows
    ]
    return critic.values(pack(rows, settings.packing, RowSignals(images=groups.images))) if rows else {}
