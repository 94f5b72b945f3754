"""The contract suite of estimators and losses: every one of agentrl passes, and false declarations are found."""

from __future__ import annotations

import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.advantages.agent_norm import AgentNorm
from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.advantages.rae import Rae
from agentrl.algo.advantages.rloo import Rloo
from agentrl.algo.base import AdvantageEstimator, PolicyLoss, TokenLoss
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.losses.ppo_clip import PpoClip
from agentrl.algo.losses.reinforce import Reinforce
from agentrl.testing import ContractError, check_estimator, check_loss


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_keeps_the_contract(name: str) -> None:
    check_estimator(ESTIMATORS[name](name=name))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_keeps_the_contract(name: str) -> None:
    check_loss(POLICY_LOSSES[name](name=name))


class NoStream(AgentNorm):
    streams = True


class NoComparison(Rae):
    compares_group = True


class NoReturns(Grpo):
    needs_critic = True


class Lost(Rae):
    def load_state(self, state):
        """Forget the state."""


class Shared(Rae):
    def state(self):
        return self.baselines


class Dropping(Rloo):
    def advantages(self, inputs):
        return dict(list(super().advantages(inputs).items())[1:])


class Counting(Rae):
    def advantages(self, inputs):
        self.update(inputs)
        return super().advantages(inputs)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (NoStream(), "streams=True, and the advantages of a group depend on the other groups"),
        (NoComparison(), "compares_group=True, and a task's only rollout has an advantage that is not 0"),
        (NoReturns(), "has needs_critic=True and no method `returns`"),
        (Lost(), "another instance that loads the state computes other advantages"),
        (Shared(), "later updates change; return a copy"),
        (Dropping(), "returned none for rollout '0/0'"),
        (Counting(), "advantages changes the state; only `update` may"),
    ],
)
def test_a_false_declaration_is_found(estimator: AdvantageEstimator, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_estimator(estimator)


class Mean(Reinforce):
    def token_loss(self, logprobs_N, old_N, inputs):
        loss = super().token_loss(logprobs_N, old_N, inputs)
        return TokenLoss(loss.loss_N - loss.loss_N.mean() if len(logprobs_N) else loss.loss_N, loss.clipped_N)


class Sum(Reinforce):
    def token_loss(self, logprobs_N, old_N, inputs):
        loss = super().token_loss(logprobs_N, old_N, inputs)
        return TokenLoss(loss.loss_N.sum(), loss.clipped_N)


class Regularised(Reinforce):
    def token_loss(self, logprobs_N, old_N, inputs):
        loss = super().token_loss(logprobs_N, old_N, inputs)
        return TokenLoss(loss.loss_N + logprobs_N.square(), loss.clipped_N)


class Everywhere(PpoClip):
    def token_loss(self, logprobs_N, old_N, inputs):
        loss = super().token_loss(logprobs_N, old_N, inputs)
        return TokenLoss(loss.loss_N, torch.ones_like(loss.clipped_N))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Mean(), "the loss of a token depends on others"),
        (Sum(), r"must return \[12\] numbers"),
        (Regularised(), "tokens without an advantage have a gradient"),
        (Everywhere(), "clipped_N is true at tokens whose gradient is not 0"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_found(loss: PolicyLoss, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_loss(loss)
