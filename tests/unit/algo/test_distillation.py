"""The term of on-policy distillation: values, weights of teachers, and the gradient of the reverse KL divergence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.batch.groups import group_rollouts
from agentrl.config.load import load_config
from agentrl.core.errors import UngradedError
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from agentrl.train.step_scores import StepScores
from tests.algo_config import make_algo
from tests.batches import training_step

TEACHERS = ["algo.distillation.teachers.a.url=http://a", "algo.distillation.teachers.b.url=http://b"]


def row(rollout: str, number: int, mask: list[int], seed: int) -> Row:
    values = np.array(mask, np.uint8)
    return Row(
        key=RowKey("p", rollout, row=number),
        token_ids=np.arange(len(mask), dtype=np.int32),
        provenance=(values * Provenance.SAMPLED).astype(np.uint8),
        mask=values,
        mask_reason=np.where(values, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=-np.random.default_rng(seed).exponential(1.0, len(mask)).astype(np.float32) * values,
        versions=values.astype(np.int32) - 1,
        requests=values.astype(np.int32) - 1,
        request_ids=("q",),
    )


def rollouts() -> list[Rollout]:
    """Two turns with an observation between them, and a rollout of two rows."""
    first = Rollout("p", "r0", [row("r0", 0, [0, 0, 1, 1, 0, 0, 1], 0)], 1.0, StopReason.TERMINATED)
    second = [row("r1", 0, [0, 1, 1], 1), row("r1", 1, [0, 0, 0, 1, 0, 1], 2)]
    return [first, Rollout("p", "r1", second, 0.0, StopReason.TERMINATED)]


def scores(scored_rollouts: list[Rollout], names: str, only: tuple[str, ...] = ("r0", "r1")) -> StepScores:
    def of(name: str, row: Row) -> np.ndarray:
        return -np.random.default_rng([ord(name), row.key.row, len(row.mask)]).exponential(1.0, len(row.mask))

    rows = [row for rollout in scored_rollouts for row in rollout.rows if row.key.rollout_id in only]
    return StepScores(teachers={name: {row.key: of(name, row).astype(np.float32) for row in rows} for name in names})


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_the_term_equals_a_plain_reference_in_float64(reward_coef: float) -> None:
    changes = [
        *TEACHERS, "algo.distillation.teachers.b.weight=3", "algo.distillation.coef=0.25",
        f"algo.distillation.reward_coef={reward_coef}",
    ]  # fmt: skip
    config, given_rollouts = load_config(None, changes), rollouts()
    groups, scored = group_rollouts(given_rollouts), scores(given_rollouts, "ab")
    actual = training_step(config, groups, scored).advantages
    rewards = {"r0": 2**-0.5, "r1": -(2**-0.5)}  # GRPO: of two rewards, 0 and 1
    for rollout in given_rollouts:
        for row in rollout.rows:
            teacher = sum(
                share * scored.teachers[name][row.key].astype(np.float64) for name, share in (("a", 0.25), ("b", 0.75))
            )
            expected = reward_coef * rewards[rollout.rollout_id] - 0.25 * (row.logprobs.astype(np.float64) - teacher)
            np.testing.assert_allclose(actual[row.key], expected * row.mask, atol=2e-6)


def test_a_rollout_has_the_teachers_that_scored_it_alone() -> None:
    config, scored_rollouts = load_config(None, [*TEACHERS, "algo.distillation.reward_coef=0"]), rollouts()
    a, b = scores(scored_rollouts, "a", ("r0",)).teachers["a"], scores(scored_rollouts, "b", ("r1",)).teachers["b"]
    scored = StepScores(teachers={"a": a, "b": b})
    advantages = training_step(config, group_rollouts(scored_rollouts), scored).advantages
    gaps = {}
    for row in (row for rollout in scored_rollouts for row in rollout.rows):
        teacher = (a if row.key.rollout_id == "r0" else b)[row.key]
        gaps[row.key] = row.logprobs[row.mask == 1] - teacher[row.mask == 1]
        np.testing.assert_allclose(advantages[row.key][row.mask == 1], -gaps[row.key], atol=1e-6)
    metrics = scored.distillation_metrics(config.algo, group_rollouts(scored_rollouts))
    r0, r1 = gaps[scored_rollouts[0].rows[0].key], np.concatenate([gaps[row.key] for row in scored_rollouts[1].rows])
    assert metrics == pytest.approx(
        {
            "train/teacher_kl": np.concatenate([r0, r1]).mean(),
            "train/teacher_kl/a": r0.mean(),
            "train/teacher_kl/b": r1.mean(),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("logprob", [-np.inf, np.nan])
def test_a_teacher_without_a_finite_log_probability_is_refused(logprob: float) -> None:
    config, given = load_config(None, [TEACHERS[0], "algo.distillation.reward_coef=0"]), rollouts()
    scored = scores(given, "a")
    row = given[0].rows[0]
    scored.teachers["a"][row.key][int(row.mask.argmax())] = logprob
    with pytest.raises(UngradedError, match=r"'r0' of task .* not finite.*algo\.distillation\.teachers"):
        _ = training_step(config, group_rollouts(given), scored).advantages


def test_the_policy_is_the_learner_where_it_was_computed() -> None:
    config, scored_rollouts = load_config(None, [TEACHERS[0], "algo.distillation.reward_coef=0"]), rollouts()
    [rows] = scored_rollouts[0].rows
    learner = {
        each.key: np.full(len(each.mask), -2.0, np.float32) for rollout in scored_rollouts for each in rollout.rows
    }
    advantages = training_step(
        config, group_rollouts(scored_rollouts), StepScores(learner, teachers=scores(scored_rollouts, "a").teachers)
    ).advantages
    teacher = scores(scored_rollouts, "a").teachers["a"][rows.key]
    np.testing.assert_allclose(advantages[rows.key][rows.mask == 1], (teacher + 2.0)[rows.mask == 1], atol=1e-6)


def test_teachers_alone_need_no_group_and_no_reward() -> None:
    config = load_config(None, [TEACHERS[0], "algo.distillation.reward_coef=0", "rollout.n_samples_per_prompt=1"])
    scored_rollouts = rollouts()[:1]
    scored_rollouts[0].reward = float("nan")
    advantages = training_step(config, group_rollouts(scored_rollouts), scores(scored_rollouts, "a")).advantages
    assert all(np.isfinite(values).all() and values.any() for values in advantages.values())
    assert "algo.distillation.teachers" in training_step(config, scored_rollouts).why_untrained()


def test_gspo_has_the_mean_of_the_term_over_a_sequence() -> None:
    config = load_config(None, [TEACHERS[0], "algo.distillation.reward_coef=0", "algo.loss.name=gspo"])
    scored_rollouts = rollouts()
    run_config, plain = (
        training_step(one, group_rollouts(scored_rollouts), scores(scored_rollouts, "a")).advantages
        for one in (config, load_config(None, [TEACHERS[0], "algo.distillation.reward_coef=0"]))
    )
    keys = [one.key for one in scored_rollouts[1].rows]
    tokens = np.concatenate([plain[one.key][one.mask == 1] for one in scored_rollouts[1].rows])
    for key, one in zip(keys, scored_rollouts[1].rows, strict=True):
        np.testing.assert_allclose(run_config[key], tokens.mean() * one.mask, atol=1e-6)


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    """Over all tokens of a vocabulary, each weighted by its probability, in place of samples."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - teacher)).sum()
    [expected] = torch.autograd.grad(kl, logits, retain_graph=True)
    old = policy.detach()
    loss_input = LossInput(weight_N=old.exp(), advantages_N=-(old - teacher), logprobs_N=old)
    loss, _ = make_objective(make_algo(loss={"name": "reinforce"}))(policy, loss_input)
    [actual] = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
