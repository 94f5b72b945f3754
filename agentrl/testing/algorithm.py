"""Contract checks of advantage estimators and policy losses, for their authors' tests.

Legend: ``N`` tokens of a micro-batch, ``T`` tokens of a row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages, LossInput, PolicyLoss, TokenLoss
from agentrl.batch.groups import group_rollouts
from agentrl.core.types import FinishReason, MaskReason, Provenance, Rollout, Row, RowKey, StopReason, Turn
from agentrl.testing.contract import call_author_code, require, require_json

_GROUPS, _SAMPLES = 3, 4
_ROW = np.array([0, 0, 1, 1, 0, 1, 1, 1], bool)
"""Which tokens of a row are sampled: two turns, after a prompt and after an observation."""
_TURNS = np.array([-1, -1, 0, 0, -1, 1, 1, 1], np.int32)


def check_estimator(estimator: AdvantageEstimator) -> None:
    """Check an estimator against the contract, and that what its class declares is true.

    It returns a finite advantage for every rollout, in any order of the rollouts, and changes nothing by that. With
    ``streams`` the advantages of a group are the same without the other groups. With ``compares_group`` a single
    rollout has the advantage 0. With ``needs_critic`` it returns finite targets for the critic. Its state is JSON, and another
    instance that loads it continues alike.

    Example::

        check_estimator(BestOfGroup())

    Args:
        estimator: a new instance, with any options.

    Raises:
        ContractError: a rule is violated; the message has what the estimator does and what it should.
    """
    name, state = type(estimator).__name__, estimator.state()
    rollouts = _make_rollouts(estimator.needs_nonnegative_rewards)
    advantages_by_row = _advantages(estimator, rollouts)
    require(estimator.state() == state, f"{name}.advantages changes the state; only `update` may")
    reordered = _advantages(estimator, rollouts[::-1])
    _require_equal(advantages_by_row, reordered, f"{name}.advantages depends on the order of the rollouts")
    if estimator.streams:
        for number in range(_GROUPS):
            group = [rollout for rollout in rollouts if rollout.prompt_id == f"task{number}"]
            message = f"{name}.streams=True, and the advantages of a group depend on the other groups"
            _require_equal(_advantages(estimator, group), advantages_by_row, message)
    if estimator.compares_group:
        alone = _advantages(estimator, [rollout for rollout in rollouts if rollout.rollout_id.endswith("/0")])
        zero = not any(row_T.any() for row_T in alone.values())
        require(zero, f"{name}.compares_group=True, and a task's only rollout has an advantage that is not 0")
    if estimator.needs_critic:
        inputs = _make_inputs(rollouts)
        returns = call_author_code(f"{name}.returns", lambda: estimator.returns(inputs))
        finite = all(row.key in returns and np.isfinite(returns[row.key]).all() for row in inputs.groups.rows)
        require(finite, f"{name}.returns must have finite numbers for every row")
    _check_state(estimator, rollouts)


def _check_state(estimator: AdvantageEstimator, rollouts: Sequence[Rollout]) -> None:
    name = type(estimator).__name__
    call_author_code(f"{name}.update", lambda: estimator.update(_make_inputs(rollouts)))
    state = call_author_code(f"{name}.state", estimator.state)
    require_json(state, f"{name}.state")
    text = json.dumps(state)
    resumed = type(estimator)(estimator.options, estimator.name)
    call_author_code(f"{name}.load_state", lambda: resumed.load_state(json.loads(text)))
    message = f"{name}: another instance that loads the state computes other advantages"
    _require_equal(_advantages(resumed, rollouts), _advantages(estimator, rollouts), message)
    for source in ("", "some_source"):
        for metric, number in estimator.metrics(source).items():
            require(math.isfinite(number), f"{name}.metrics: {metric} is {number}")
            require(source in metric, f"{name}.metrics: {metric} does not have the source {source}")
    estimator.update(_make_inputs(rollouts))
    require(json.dumps(state) == text, f"{name}.state returns an object that later updates change; return a copy")


def check_loss(loss: PolicyLoss) -> None:
    """Check a policy loss against the contract, and that what its class declares is true.

    Losses and gradients are finite, of a micro-batch without a token too. The gradient is 0 where ``clipped_N`` is true,
    and without an advantage. The loss of a token depends on no other token, or with ``needs_whole_sequences`` only on the
    ratio of its sequence, which it takes from ``sequence_log_ratio_N`` if that is set.

    Args:
        loss: with any options.

    Raises:
        ContractError: a rule is violated; the message has what the loss does and what it should.
    """
    name = type(loss).__name__
    generator = torch.Generator().manual_seed(0)
    old_N = -3 * torch.rand(12, generator=generator) - 0.1
    new_N = (old_N + 0.8 * torch.randn(12, generator=generator)).clamp(max=-0.01)
    advantages_N = torch.randn(12, generator=generator)
    sequence_N = torch.arange(12) // 4
    log_ratio_N = torch.zeros(3).index_add(0, sequence_N, new_N - old_N)[sequence_N] / 4
    inputs = LossInput(
        torch.ones(12), advantages_N, old_N, sequence_N, torch.full((12,), 4.0), sequences=3, sequence_log_ratio_N=None
    )
    token_loss, gradient_N = _loss_and_gradient(loss, new_N, old_N, inputs)
    clipped_at_zero = bool((gradient_N[token_loss.clipped_N] == 0).all())
    require(clipped_at_zero, f"{name}: clipped_N is true at tokens whose gradient is not 0")
    at_M = torch.tensor([7, 2, 9])
    part = inputs.at(at_M)
    if loss.needs_whole_sequences:
        with_ratio = LossInput(inputs.weight_N, advantages_N, old_N, sequence_log_ratio_N=log_ratio_N)
        ratio_loss, _ = _loss_and_gradient(loss, new_N, old_N, with_ratio)
        same = torch.allclose(ratio_loss.loss_N, token_loss.loss_N, atol=1e-5)
        require(same, f"{name} must take the log-ratio of sequences from sequence_log_ratio_N if it is set")
        part = with_ratio.at(at_M)
    part_loss, _ = _loss_and_gradient(loss, new_N[at_M], old_N[at_M], part)
    same = torch.allclose(part_loss.loss_N, token_loss.loss_N[at_M], atol=1e-5)
    require(same, f"{name}: the loss of a token depends on others; set needs_whole_sequences for ratios of sequences")
    without = LossInput(inputs.weight_N, torch.zeros(12), old_N, sequence_N, inputs.sequence_size_N, sequences=3)
    _, zero_N = _loss_and_gradient(loss, new_N, old_N, without)
    require(not bool(zero_N.any()), f"{name}: tokens without an advantage have a gradient")
    _loss_and_gradient(loss, new_N[:0], old_N[:0], inputs.at(at_M[:0]))


def _loss_and_gradient(
    loss: PolicyLoss, new_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput
) -> tuple[TokenLoss, torch.Tensor]:
    name, logprobs_N = type(loss).__name__, new_N.clone().requires_grad_()
    token_loss = call_author_code(f"{name}.token_loss", lambda: loss.token_loss(logprobs_N, old_N, inputs))
    shapes = token_loss.loss_N.shape == token_loss.clipped_N.shape == new_N.shape
    require(shapes, f"{name}.token_loss must return [{len(new_N)}] numbers, it returned {[*token_loss.loss_N.shape]}")
    require(
        token_loss.clipped_N.dtype == torch.bool, f"{name}: clipped_N must be bool, it is {token_loss.clipped_N.dtype}"
    )
    require(bool(token_loss.loss_N.isfinite().all()), f"{name}: a loss is not finite")
    require(token_loss.loss_N.requires_grad, f"{name}: the loss has no gradient")
    (gradient_N,) = torch.autograd.grad(token_loss.loss_N.sum(), logprobs_N)
    require(bool(gradient_N.isfinite().all()), f"{name}: a gradient is not finite")
    return token_loss, gradient_N


def _make_rollouts(nonnegative: bool) -> list[Rollout]:
    """Return groups of rollouts of two roles, with two turns and one row each."""
    generator = np.random.default_rng(0)
    rewards = generator.normal(size=(_GROUPS, _SAMPLES)) + np.arange(_GROUPS)[:, None]
    if nonnegative:
        rewards = np.abs(rewards)
    return [
        _make_rollout(f"task{group}", f"{group}/{sample}", float(rewards[group, sample]), sample % 2)
        for group in range(_GROUPS)
        for sample in range(_SAMPLES)
    ]


def _make_rollout(prompt_id: str, rollout_id: str, reward: float, seat: int) -> Rollout:
    row = Row(
        key=RowKey(prompt_id, rollout_id, "agent", 0),
        token_ids=np.arange(len(_ROW), dtype=np.int32),
        provenance=np.where(_ROW, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=_ROW.astype(np.uint8),
        mask_reason=np.where(_ROW, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.where(_ROW, -1.0, 0.0).astype(np.float32),
        versions=np.where(_ROW, 0, -1).astype(np.int32),
        requests=_TURNS,
        request_ids=(f"{rollout_id}/0", f"{rollout_id}/1"),
    )
    turns = [Turn("", "", FinishReason.STOP, share * reward) for share in (0.25, 0.75)]
    return Rollout(
        prompt_id, rollout_id, [row], reward, StopReason.TERMINATED, turns=turns, sampled_tokens=int(_ROW.sum()),
        role=("first", "second")[seat], seat=seat, opponent="mirror", episode=f"{prompt_id}/{seat}",
    )  # fmt: skip


def _make_inputs(rollouts: Sequence[Rollout]) -> AdvantageInput:
    groups = group_rollouts(rollouts)
    values = {
        row.key: np.float32(0.1) * np.arange(len(row.mask), dtype=np.float32) + np.float32(len(row.key.rollout_id))
        for row in groups.rows
    }
    return AdvantageInput(groups, values=values)


def _advantages(estimator: AdvantageEstimator, rollouts: Sequence[Rollout]) -> dict[RowKey, NDArray[np.float64]]:
    """Return the checked advantages of every row at its trained tokens."""
    name, inputs = type(estimator).__name__, _make_inputs(rollouts)
    advantages: Advantages = call_author_code(f"{name}.advantages", lambda: estimator.advantages(inputs))
    by_key: dict[object, object] = {**advantages}  # type: ignore[dict-item]
    trained = {}
    for row in inputs.groups.rows:
        advantage = by_key.get(row.key, by_key.get(row.key.rollout_id))
        require(advantage is not None, f"{name}.advantages returned none for rollout {row.key.rollout_id!r}")
        row_T = np.broadcast_to(np.asarray(advantage, np.float64), row.mask.shape)
        trained[row.key] = row_T[row.mask.astype(bool)]
        require(
            bool(np.isfinite(trained[row.key]).all()), f"{name}.advantages of {row.key.rollout_id!r} are not finite"
        )
    return trained


def _require_equal(
    advantages: dict[RowKey, NDArray[np.float64]], others: dict[RowKey, NDArray[np.float64]], message: str
) -> None:
    require(all(np.allclose(row_T, others[key], atol=1e-6) for key, row_T in advantages.items()), message)
