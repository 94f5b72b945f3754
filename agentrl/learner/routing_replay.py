"""Experts of replayed tokens, for the routers of every learner backend.

Legend: ``L`` tokens of a micro-batch, ``T`` tokens of a layer's router, ``K`` experts of a token, ``E`` experts of a layer.
"""

from __future__ import annotations

import torch

from agentrl.batch.microbatch import to_device


def experts_by_layer(experts_L: torch.Tensor, token_slice: slice, device: torch.device) -> torch.Tensor:
    """Return the experts ``[layers, T, K]`` of a part of the tokens, from ``[L, layers, K]`` on the CPU."""
    return to_device(experts_L[token_slice].transpose(0, 1).contiguous(), device)


def replay_experts(replayed_T_K: torch.Tensor, chosen_T_K: torch.Tensor, scores_T_E: torch.Tensor) -> torch.Tensor:
    """Return int64 experts ``[T, K]``: the replayed ones, and the router's choice where they are no numbers of experts."""
    is_expert = replayed_T_K < scores_T_E.shape[1]
    return torch.where(is_expert, replayed_T_K.to(chosen_T_K.dtype), chosen_T_K)
