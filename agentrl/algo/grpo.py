"""GRPO: group-relative advantages, PPO's clipped loss per token, a KL term to a reference policy, an entropy bonus."""

from __future__ import annotations

import torch

from agentrl.algo.advantages.group_relative import group_relative
from agentrl.algo.base import LossInput, LossMetrics
from agentrl.algo.kl import kl_estimate
from agentrl.algo.losses.ppo_clip import clipped_policy_loss
from agentrl.config.algo import GrpoConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this in the metrics, so that one token cannot make the mean infinite."""


class Grpo:
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300)."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL term."""
        return self.config.needs_reference

    @property
    def needs_entropy(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.config.needs_entropy

    def advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
        """See `agentrl.algo.advantages.group_relative.group_relative`."""
        return group_relative(rewards_N, groups_N, std_normalise=self.config.std_normalise, eps=self.config.std_eps)

    def loss(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return ``Σ weight · (clipped policy loss + kl_coef · KL estimate - entropy_coef · entropy)`` and its metrics.

        See `clipped_policy_loss` and `agentrl.algo.kl.kl_estimate`. The last two terms have a gradient also where the
        policy loss is clipped or has no advantage. The KL term's metrics are ``kl``, always k3 regardless of
        ``kl_kind``, and ``kl_loss``, ``Σ weight · KL estimate`` before ``kl_coef``.
        """
        on_policy = self.config.old_logprobs == "learner"
        old_N = logprobs_N.detach() if on_policy else inputs.logprobs_N
        loss_N, clipped_N = clipped_policy_loss(
            logprobs_N, old_N, inputs.advantages_N, self.config.clip_low, self.config.clip_high
        )
        metrics = _metrics(logprobs_N.detach(), old_N, clipped_N, inputs)
        if self.needs_reference:
            reference_N = inputs.reference_logprobs_N
            assert reference_N is not None, "the learner gave no log-probabilities of the reference policy"
            kl_N = kl_estimate(logprobs_N, reference_N, self.config.kl_kind)
            loss_N = loss_N + self.config.kl_coef * kl_N
            metrics.sums["kl"] = kl_estimate(logprobs_N.detach(), reference_N, "k3").sum()
            metrics.totals["kl_loss"] = (inputs.weight_N * kl_N.detach()).sum()
        if self.needs_entropy:
            assert inputs.entropy_N is not None, "the learner gave no entropies"
            loss_N = loss_N - self.config.entropy_coef * inputs.entropy_N
        return (inputs.weight_N * loss_N).sum(), metrics


@torch.no_grad()
def _metrics(logprobs_N: torch.Tensor, old_N: torch.Tensor, clipped_N: torch.Tensor, inputs: LossInput) -> LossMetrics:
    """Return metrics of ratio and clipping, and of the difference between sampler and learner.

    ``sampler_kl`` is the estimator k3 of KL(sampler ‖ learner), ``r - 1 - log r`` with ``r`` learner over sampler
    (Schulman, "Approximating KL Divergence"): never negative, and 0 if both agree on every token.
    """
    ratio_N = (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap_N = (logprobs_N - inputs.logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero = ratio_N.new_zeros(1)
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
    )
