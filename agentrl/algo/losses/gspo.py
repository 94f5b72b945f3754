"""Group sequence policy optimisation."""

from __future__ import annotations

import torch

from agentrl.algo.base import LossInput, TokenLoss
from agentrl.algo.losses.ppo_clip import clipped
from agentrl.config.algo import GspoLoss


def gspo(logprobs_N: torch.Tensor, old_N: torch.Tensor, given: LossInput, options: GspoLoss) -> TokenLoss:
    """Return ``-min(sA, clip(s, 1 - low, 1 + high)A)`` at each token, with the ratio ``s`` of its sequence.

    Source: Zheng et al., arXiv:2507.18071. ``s = exp(mean(logprob - old))`` over all that one agent sampled in the rollout
    (equation 7). As a function of the token it is ``sg(s) · π / sg(π)`` (equation 14): then the sum over the sequence has
    the value and the gradient of the sequence's own objective (equation 5), and rows of a sequence may be in different
    micro-batches. ``gspo`` gives a sequence one advantage, ``gspo_token`` each token its own.
    """
    log_ratio_N = given.sequence_log_ratio_N
    if log_ratio_N is None:
        log_ratio_N = given.sequence_mean(logprobs_N.detach() - old_N)
    return clipped(
        log_ratio_N + logprobs_N - logprobs_N.detach(), given.advantages_N, options.clip_low, options.clip_high
    )
