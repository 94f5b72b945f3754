"""The loss of reinforcement learning: policy loss, importance correction, KL term and entropy bonus."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.algo.base import MAX_LOG_RATIO, LossInput, LossMetrics, PolicyLoss, TokenLoss
from agentrl.algo.correction import importance_weights
from agentrl.algo.kl import kl_estimate
from agentrl.config.algo import AlgoConfig


class PolicyObjective:
    """``Σ weight · (correction · policy loss + kl_coef · KL estimate - entropy_coef · entropy)`` over a micro-batch.

    The last two terms have a gradient also where the policy loss is clipped, has no advantage or is rejected.

    Args:
        config: of the objective.
        policy_losses: the loss of each token, by the number of its source; a single one is that of all tokens.
    """

    def __init__(self, config: AlgoConfig, policy_losses: Sequence[PolicyLoss]) -> None:
        self.config = config
        self.policy_losses = policy_losses
        correction = config.correction
        self._corrects_here = correction.active and not correction.needs_all_tokens

    def __call__(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss and its metrics. ``kl`` is k3 regardless of ``kl_kind``, ``kl_loss`` is before ``kl_coef``."""
        old_N, weight_N = self.old_logprobs(logprobs_N, inputs), inputs.weight_N
        token = self._token_loss(logprobs_N, old_N, inputs)
        metrics = _metrics(logprobs_N.detach(), old_N, token.clipped_N, inputs)
        correction_N = self._correction(logprobs_N.detach(), inputs)
        loss_N = token.loss_N
        if correction_N is not None:
            loss_N = correction_N * loss_N
            metrics.sums |= {
                "correction_mean": correction_N.sum(),
                "correction_rejected": (correction_N == 0).sum().float(),
            }
        if self.config.has_kl and self.config.kl_in == "loss":
            reference_N = inputs.reference_logprobs_N
            assert reference_N is not None, "the learner gave no log-probabilities of the reference policy"
            kl_N = kl_estimate(logprobs_N, reference_N, self.config.kl_kind)
            loss_N = loss_N + self.config.kl_coef * kl_N
            metrics.sums["kl"] = kl_estimate(logprobs_N.detach(), reference_N, "k3").sum()
            metrics.totals["kl_loss"] = (weight_N * kl_N.detach()).sum()
        if self.config.needs_entropy:
            assert inputs.entropy_N is not None, "the learner gave no entropies"
            loss_N = loss_N - self.config.entropy_coef * inputs.entropy_N
        return (weight_N * loss_N).sum(), metrics

    def _token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        """Return the policy loss of each token, which is that of its source."""
        policy_losses, places = self.policy_losses, inputs.source_tokens
        if len(policy_losses) == 1 or not places:
            return policy_losses[0].token_loss(logprobs_N, old_N, inputs)
        losses = [
            policy_losses[source].token_loss(logprobs_N[at_M], old_N[at_M], inputs.at(at_M))
            for source, at_M in places.items()
        ]
        order_N = torch.cat(list(places.values()))
        loss_N, clipped_N = torch.zeros_like(logprobs_N), torch.zeros_like(order_N, dtype=torch.bool)
        return TokenLoss(
            loss_N.index_copy(0, order_N, torch.cat([loss.loss_N for loss in losses])),
            clipped_N.index_copy(0, order_N, torch.cat([loss.clipped_N for loss in losses])),
        )

    def old_logprobs(self, logprobs_N: torch.Tensor, inputs: LossInput) -> torch.Tensor:
        """Return the log-probabilities in the ratio's denominator, ``[N]`` without gradient; see ``algo.old_logprobs``."""
        return (
            inputs.logprobs_N
            if self.config.old_logprobs == "sampler"
            else _learner_logprobs(logprobs_N.detach(), inputs)
        )

    def _correction(self, logprobs_N: torch.Tensor, inputs: LossInput) -> torch.Tensor | None:
        """Return importance weights: the driver's, or those of each token alone."""
        if inputs.correction_N is not None or not self._corrects_here:
            return inputs.correction_N
        log_ratio_N = _learner_logprobs(logprobs_N, inputs) - inputs.logprobs_N
        return importance_weights(log_ratio_N, torch.arange(len(log_ratio_N)), self.config.correction)


def _learner_logprobs(logprobs_N: torch.Tensor, inputs: LossInput) -> torch.Tensor:
    """Return the learner's log-probabilities before the first optimizer step; without a pass before it, those of this pass."""
    return logprobs_N if inputs.learner_logprobs_N is None else inputs.learner_logprobs_N


@torch.no_grad()
def _metrics(logprobs_N: torch.Tensor, old_N: torch.Tensor, clipped_N: torch.Tensor, inputs: LossInput) -> LossMetrics:
    """Return metrics of ratio and clipping, and of the difference between sampler and learner.

    ``sampler_kl`` is the estimator k3 of KL(sampler ‖ learner), ``r - 1 - log r`` with ``r`` learner over sampler
    (Schulman, "Approximating KL Divergence"): never negative, and 0 if both agree on every token.
    ``effective_sample_size`` is that of the same ratios as weights.
    """
    ratio_N = (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap_N = (_learner_logprobs(logprobs_N, inputs) - inputs.logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero, weight_N = ratio_N.new_zeros(1), gap_N.exp()
    return LossMetrics(
        sums={
            "ratio_mean": ratio_N.sum(),
            "clip_fraction": clipped_N.sum().float(),
            "sampler_kl": (gap_N.expm1() - gap_N).sum(),
        },
        maxima={
            "ratio_max": torch.cat([ratio_N, zero]).max(),
            "sampler_gap_max": torch.cat([gap_N.abs(), zero]).max(),
        },
        weights={"effective_sample_size": torch.stack([weight_N.sum(), weight_N.square().sum()])},
    )
