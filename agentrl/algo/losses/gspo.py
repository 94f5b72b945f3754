"""Group sequence policy optimisation, also with the gradient of each token."""

from __future__ import annotations

import torch
from pydantic import Field
from typing_extensions import override

from agentrl.algo.base import LossInput, PolicyLoss, TokenLoss
from agentrl.algo.losses.ppo_clip import clip_loss


class Gspo(PolicyLoss):
    """``-min(sA, clip(s, 1 - low, 1 + high)A)`` at each token, with the ratio ``s`` and the mean advantage ``A`` of its sequence.

    Source: Zheng et al., arXiv:2507.18071. ``s = exp(mean(logprob - old))`` over all that one agent sampled in the rollout
    (equation 7). As a function of the token it is ``sg(s) · π / sg(π)`` (equation 14): then the sum over the sequence has
    the value and the gradient of the sequence's own objective (equation 5), and rows of a sequence may be in different
    micro-batches.
    """

    one_advantage_per_sequence = True
    needs_whole_sequences = True

    class Options(PolicyLoss.Options):
        """Options of ``gspo``."""

        clip_low: float = Field(default=3e-4, gt=0, lt=1)
        """The sequence's ratio gains nothing below ``1 - clip_low``."""
        clip_high: float = Field(default=4e-4, gt=0)
        """The sequence's ratio gains nothing above ``1 + clip_high``."""

    options: Options

    @override
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        log_ratio_N = inputs.sequence_log_ratio_N
        if log_ratio_N is None:
            log_ratio_N = inputs.sequence_mean(logprobs_N.detach() - old_N)
        return clip_loss(
            log_ratio_N + (logprobs_N - logprobs_N.detach()),
            inputs.advantages_N,
            self.options.clip_low,
            self.options.clip_high,
        )


class GspoToken(Gspo):
    """The loss of ``gspo`` in which each token has its own advantage (arXiv:2507.18071, equation 13)."""

    one_advantage_per_sequence = False
