"""What the optimizer steps of a training step train on: scores, advantages, corrections, and the division of rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageInput, RoleBaseline, RowValues
from agentrl.algo.correction import importance_weights
from agentrl.algo.distillation import teacher_gaps, teacher_metrics
from agentrl.algo.estimate import RowAdvantages, estimate_advantages, next_baselines
from agentrl.algo.kl import kl_estimate
from agentrl.batch.groups import RolloutGroups, groups_by_policy, groups_by_source
from agentrl.batch.lr_schedule import lr_scale
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.batch.sequences import SampledSequence, sequences_of
from agentrl.config.learner import OptimizerConfig
from agentrl.config.schema import Config
from agentrl.core.types import Rollout, Row, RowKey
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.registry import make_backend

Baselines = Mapping[str, Mapping[str, RoleBaseline]]
"""The baselines of ``rae`` by source of the run (``""`` in a run without ``sources``), role and class of opponents."""


@dataclass(frozen=True, slots=True)
class StepScores:
    """What models say of the rollouts of a training step before its first optimizer step; empty if it is not needed."""

    learner: RowValues = field(default_factory=dict)
    """Log-probabilities of the learner."""
    reference: RowValues = field(default_factory=dict)
    """Log-probabilities of the reference policy, if the KL term is in the reward."""
    values: RowValues = field(default_factory=dict)
    """The critic's values."""
    teachers: Mapping[str, RowValues] = field(default_factory=dict)
    """Log-probabilities of teachers by name, of the rows that each scores."""

    def joined(self, others: StepScores) -> StepScores:
        """Return these and the scores of other rollouts. There are none of a critic or of teachers."""
        return StepScores({**self.learner, **others.learner}, {**self.reference, **others.reference})

    def policy(self, row: Row) -> NDArray[np.float32]:
        """Return the policy's log-probabilities of a row: the learner's if they were computed, else the engine's."""
        return np.asarray(self.learner.get(row.key, row.logprobs), np.float32)


def needs_scores(config: Config) -> bool:
    """Return whether a training step begins with passes over its rollouts."""
    return _needs_learner(config) or _kl_in_reward(config) or config.algo.needs_critic


def score_rollouts(
    config: Config, groups: RolloutGroups, learner: LearnerGroup, critic: CriticGroup | None, pad_id: int
) -> StepScores:
    """Compute what the advantages, the loss or the correction need of all rollouts. Blocks.

    Raises:
        LearnerError: a rank failed.

    """
    own, reference = dict[RowKey, Any](), dict[RowKey, Any]()
    for policy, part in groups_by_policy(groups).items():
        batch = pack(part.rows, policy=policy, **packing_options(config, pad_id))
        own |= learner.logprobs(batch) if _needs_learner(config) else {}
        reference |= learner.logprobs(batch, "reference") if _kl_in_reward(config) else {}
    values = _values(config, groups, critic, pad_id) if critic is not None else {}
    return StepScores(own, reference, values)


def _values(config: Config, groups: RolloutGroups, critic: CriticGroup, pad_id: int) -> RowValues:
    """Return the critic's values of the rollouts whose estimator needs them."""
    parts = groups_by_source(groups, config.sources).items()
    rows = [row for name, part in parts if config.algo.by_source[name].needs_critic for row in part.rows]
    return critic.values(pack(rows, **packing_options(config, pad_id))) if rows else {}


def _needs_learner(config: Config) -> bool:
    algo = config.algo
    later_steps = algo.old_logprobs == "learner" and config.train.steps_per_rollout > 1
    compares = (_kl_in_reward(config) or bool(algo.distillation.teachers)) and algo.old_logprobs == "learner"
    return later_steps or algo.correction.needs_all_tokens or compares


def _kl_in_reward(config: Config) -> bool:
    return config.algo.has_kl and config.algo.kl_in == "reward"


def step_advantages(
    config: Config, groups: RolloutGroups, scores: StepScores, baselines: Baselines = MappingProxyType({})
) -> RowAdvantages:
    """Return the advantage of every trained token, by the estimator of its source. Policies are not compared with each other.

    Args:
        config: of the run.
        groups: the rollouts.
        scores: of models.
        baselines: of ``rae`` before the step.

    Raises:
        ConfigError: see `estimate_advantages` and `groups_by_source`.

    """
    gaps = _gaps(config, groups, scores) if scores.teachers else None
    found: RowAdvantages = {}
    for name, part in groups_by_source(groups, config.sources).items():
        for of_policy in groups_by_policy(part).values():
            given = advantage_input(config, of_policy, scores, baselines.get(name, {}))
            found |= estimate_advantages(config.algo.by_source[name], given, gaps)
    return found


def step_baselines(config: Config, groups: RolloutGroups, scores: StepScores, before: Baselines) -> Baselines:
    """Return the baselines of ``rae`` after the step."""
    found = dict(before)
    for name, part in groups_by_source(groups, config.sources).items():
        for of_policy in groups_by_policy(part).values():
            given = advantage_input(config, of_policy, scores, found.get(name, {}))
            found[name] = next_baselines(config.algo.by_source[name], given)
    return {name: some for name, some in found.items() if some}


def baselines_from_state(state: Mapping[str, Any]) -> Baselines:
    """Return the baselines that JSON has as lists."""
    return {name: {key: RoleBaseline(*one) for key, one in some.items()} for name, some in state.items()}


def baseline_metrics(baselines: Baselines) -> dict[str, float]:
    """Return each baseline, as ``self_play/baseline/ROLE/OPPONENTS``, in a mixed run with the source before the role."""
    return {
        "/".join(["self_play/baseline", *filter(None, [source, *key.split("/")])]): one.value
        for source, some in baselines.items()
        for key, one in some.items()
    }


def advantage_input(
    config: Config,
    groups: RolloutGroups,
    scores: StepScores,
    baselines: Mapping[str, RoleBaseline] = MappingProxyType({}),
) -> AdvantageInput:
    """Return what an estimator gets."""
    kl = _kl_penalties(config, groups, scores)
    return AdvantageInput(groups, kl=kl, values=scores.values, baselines=baselines)


def _gaps(config: Config, groups: RolloutGroups, scores: StepScores) -> RowValues:
    weights = {name: one.weight for name, one in config.algo.distillation.teachers.items()}
    return teacher_gaps(groups.rows, {row.key: scores.policy(row) for row in groups.rows}, scores.teachers, weights)


def distillation_metrics(config: Config, groups: RolloutGroups, scores: StepScores) -> dict[str, float]:
    """Return the mean divergence from the teachers, if there are any."""
    if not scores.teachers:
        return {}
    policy = {row.key: scores.policy(row) for row in groups.rows}
    return teacher_metrics(groups.rows, policy, scores.teachers, _gaps(config, groups, scores))


def _kl_penalties(config: Config, groups: RolloutGroups, scores: StepScores) -> dict[RowKey, NDArray[np.float32]]:
    """Return ``kl_coef`` times the KL estimate of each sampled token, if it belongs to the reward."""
    if not scores.reference:
        return {}
    found = {}
    for row in groups.rows:
        if row.key in scores.reference:
            policy_T = torch.from_numpy(scores.policy(row))
            reference_T = torch.from_numpy(scores.reference[row.key])
            kl_T = kl_estimate(policy_T, reference_T, config.algo.kl_kind)
            found[row.key] = np.asarray(config.algo.kl_coef * kl_T.numpy(), np.float32)
    return found


def step_correction(config: Config, groups: RolloutGroups, scores: StepScores) -> RowValues | None:
    """Return the importance weight of every trained token, if they need more than each token alone; see
    `agentrl.algo.correction`.
    """
    if not config.algo.correction.needs_all_tokens:
        return None
    parts = groups_by_policy(groups).values()
    return {key: row for part in parts for key, row in _correction(config, part, scores).items()}


def _correction(config: Config, groups: RolloutGroups, scores: StepScores) -> RowValues:
    sequences = [sequence for sequence in sequences_of(groups.rows) if sequence.size]
    gaps = [_log_ratio(sequence, scores.learner) for sequence in sequences]
    numbers = np.repeat(np.arange(len(gaps)), [len(gap) for gap in gaps])
    log_ratio_N = torch.from_numpy(np.concatenate(gaps) if gaps else np.zeros(0))
    weights_N = importance_weights(log_ratio_N, torch.from_numpy(numbers), config.algo.correction).numpy()
    parts = np.split(weights_N, np.cumsum([len(gap) for gap in gaps])[:-1]) if gaps else []
    return {key: row for one, part in zip(sequences, parts, strict=True) for key, row in one.scatter(part).items()}


def _log_ratio(sequence: SampledSequence, learner: RowValues) -> NDArray[np.float64]:
    return sequence.gather(learner) - sequence.gather({row.key: row.logprobs for row in sequence.rows})


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one of the optimizer steps of a training step trains on."""

    rows: list[Row]
    """Rows that count in the denominators of the loss."""
    trained: set[str]
    """Ids of the rollouts whose rows are trained; not empty."""
    policy: str = "main"
    """Which of several policies is trained; all rows are of this one."""
    index: int = 0
    """Of the optimizer steps of this policy in the training step."""


def optimizer_steps(config: Config, groups: RolloutGroups, advantages: RowAdvantages) -> list[OptimizerStep]:
    """Divide the rollouts among ``train.steps_per_rollout`` optimizer steps; an empty one is left out.

    Groups stay whole: each optimizer step gets the same number of groups, or one more. Rollouts without an advantage,
    such as those of groups whose rewards are all equal, add nothing to the gradient and are left out; whether they count
    in the denominators is ``batch.denominator`` (``live`` is DAPO's filter, arXiv:2503.14476, without sampling
    replacements). They stay if the loss has a KL term or an entropy bonus, to which they contribute. Rollouts without a
    token to train on are left out. Each policy of several has separate optimizer steps.
    """
    live = {key.rollout_id for key, values in advantages.items() if config.algo.trains_everything or values.any()}
    steps = []
    for policy, part in groups_by_policy(groups).items():
        index = 0
        for rollouts in divided(config, part):
            trained = {one.rollout_id for one in rollouts if any(row.mask.any() for row in one.rows)} & live
            counted = [one for one in rollouts if config.batch.denominator == "all" or one.rollout_id in trained]
            if trained:
                steps.append(OptimizerStep([row for one in counted for row in one.rows], trained, policy, index))
                index += 1
    return steps


def step_batch(
    config: Config,
    step: int,
    part: OptimizerStep,
    advantages: RowAdvantages,
    scores: StepScores,
    pad_id: int,
    correction: RowValues | None = None,
    **parts: Any,
) -> GlobalBatch:
    """Return the learner's batch of an optimizer step.

    Args:
        config: of the run.
        step: finished training steps.
        part: what it trains on.
        advantages: of its rows.
        scores: of its rows.
        pad_id: fills micro-batches.
        correction: importance weights of its rows; see `step_correction`.
        parts: arguments of `pack` for a batch that is a part of the optimizer step.

    """
    return pack(
        part.rows,
        advantages,
        trained=part.trained,
        learner_logprobs=scores.learner or None,
        correction=correction,
        lr_scale=policy_lr_scale(config, step, part.index),
        policy=part.policy,
        **packing_options(config, pad_id),
        **parts,
    )


def divided(config: Config, groups: RolloutGroups) -> Iterator[list[Rollout]]:
    """Yield the rollouts of each of ``train.steps_per_rollout`` optimizer steps, whole groups."""
    for share in np.array_split(np.arange(len(groups.prompt_ids_G)), config.train.steps_per_rollout):
        yield [one for one, group in zip(groups.rollouts_N, groups.groups_N, strict=True) if group in share]


def policy_lr_scale(config: Config, step: int, index: int) -> float:
    """Return the schedule's factor for an optimizer step of the policy, over the training steps that train it.

    Args:
        config: of the run.
        step: finished training steps.
        index: of the optimizer step in its training step.

    """
    critic_alone = config.algo.critic.warmup_steps if config.algo.needs_critic else 0
    return _lr_scale(config, config.learner.optimizer, step, index, critic_alone)


def critic_lr_scale(config: Config, step: int, index: int) -> float:
    """Return the schedule's factor for an optimizer step of the critic; see `policy_lr_scale`."""
    return _lr_scale(config, config.algo.critic.optimizer, step, index, 0)


def _lr_scale(config: Config, optimizer: OptimizerConfig, step: int, index: int, before: int) -> float:
    each = config.train.steps_per_rollout
    steps = (config.train.steps - before) * each
    return lr_scale(optimizer, ((step - before) * each + index) / steps, steps, "constant")


def packing_options(config: Config, pad_id: int) -> dict[str, Any]:
    """Return the arguments of `pack` that are the same for every batch of a run."""
    return {
        "shares": make_backend(config.learner).shares,
        "tokens_per_micro": config.batch.tokens_per_micro,
        "pad_id": pad_id,
        "share_prefixes": config.batch.share_prefixes,
        "aggregation": config.batch.aggregation,
        "constant_tokens": config.batch.constant_tokens or config.rollout.max_tokens,
        "temperature": config.sampler.temperature,
        "provenance": config.train.provenance,
        "sources": tuple(config.sources),
    }


def with_possible_sharing(config: Config, *models: LearnerGroup | CriticGroup) -> Config:
    """Return ``config`` without `batch.share_prefixes` if one of the models cannot share prefixes."""
    shares = config.batch.share_prefixes and all(model.shares_prefixes for model in models)
    return config.model_copy(update={"batch": config.batch.model_copy(update={"share_prefixes": shares})})


def live_share(groups: RolloutGroups, advantages: Mapping[RowKey, NDArray[np.float32]]) -> float:
    """Return the share of the step's sampled tokens that have an advantage."""
    sampled = sum(sequence.size for sequence in sequences_of(groups.rows))
    return sum(int((values != 0).sum()) for values in advantages.values()) / max(1, sampled)


def compares_groups(config: Config) -> bool:
    """Return whether all advantages compare the rollouts of a task."""
    return all(each.advantage.compares_group for each in config.algo.by_source.values())


def nothing_trained(config: Config, rollouts: Sequence[Rollout], groups: RolloutGroups) -> str:
    """Return why a training step has no optimizer step, with the key to change."""
    if not groups.rollouts_N:
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in Counter(one.kind for one in failures).items())
        first = f" (failures: {kinds}; the first: {failures[0].error}: {failures[0].message})" if failures else ""
        return f"all {len(rollouts)} episodes were dropped{first}; rollout.failure sets what follows a failure"
    if not config.algo.needs_reward:
        return "every sampled token has the probability that its teachers give it (algo.distillation.teachers)"
    if config.rollout.n_samples_per_prompt == 1 and compares_groups(config):
        return (
            "rollout.n_samples_per_prompt=1, but an advantage compares the rewards of a task's rollouts; "
            "set rollout.n_samples_per_prompt to 4 or more"
        )
    if groups.flat_share == 1:
        rewards_N = groups.rewards_N
        return (
            f"the rollouts of each task have equal rewards (from {rewards_N.min():g} to {rewards_N.max():g} over "
            f"{len(groups.prompt_ids_G)} tasks, {groups.dropped} of {len(rollouts)} episodes dropped), so no advantage is "
            "left; raise rollout.n_samples_per_prompt or sampler.temperature, take tasks that the policy sometimes solves, or "
            "replace such groups (rollout.filter_groups.filters=[zero_variance])"
        )
    return "no rollout with an advantage has a token to train on"
