"""Score centering (Marek and Ryabinin, arXiv:2609.20807): the engine's expected score is taken off each token's.

A token ``y`` is sampled from the engine's ``q``, and the learner's ``p`` differs from it: by precision, kernels or older weights.
The expected policy gradient then has a part without a reward: ``E_q[A s_y] = E_q[A] Σ q_v s_v + Cov_q(A, s_y)``, with the score
``s_v = ∇ log p_v`` and the advantage ``A`` (equation 3). The first part pulls ``p`` towards ``q``, step after step. Centering
takes ``Σ q_v w_v s_v`` off the score, with the weights ``w`` of ``algo.correction``, 1 without (equations 7 and 12)::

    loss = -A (w_y log p_y - Σ_v c_v log p_v)        c_v = q_v w(p_v / q_v)

``w`` and ``c`` have no gradient. The sum is over the ids that top-k and top-p have left, of which engines return all ``q_v``: it
is exact, and the paper's estimate of a tail is not needed. With ``p = q`` is ``c = p``, and the sum has no gradient, as
``Σ p_v s_v = 0``.

Legend: ``N`` tokens, ``E`` ids of all tokens.
"""

from __future__ import annotations

import torch

from agentrl.algo.correction import importance_weights
from agentrl.config.algo import CorrectionConfig


def centering_coefficients(
    logprobs_E: torch.Tensor, sampler_logprobs_E: torch.Tensor, config: CorrectionConfig
) -> torch.Tensor:
    """Return ``c`` ``[E]``, without gradient.

    Args:
        logprobs_E: the learner's log-probabilities of the ids that tokens were sampled from.
        sampler_logprobs_E: the engine's.
        config: which weights tokens have; of single tokens.
    """
    log_ratio_E = (logprobs_E - sampler_logprobs_E).detach()
    weights_E = importance_weights(log_ratio_E, torch.arange(len(log_ratio_E), device=log_ratio_E.device), config)
    return sampler_logprobs_E.detach().exp() * weights_E.to(log_ratio_E.dtype)


def centering_loss(advantages_N: torch.Tensor, centering_N: torch.Tensor) -> torch.Tensor:
    """Return what score centering adds to the loss of each token, ``[N]``.

    Args:
        advantages_N: of the tokens.
        centering_N: ``Σ c_v log p_v``, with the gradient of ``log p`` alone.
    """
    return advantages_N * centering_N
