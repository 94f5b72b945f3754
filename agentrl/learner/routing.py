"""Experts of replayed tokens, for the routers of every learner backend.

Legend: ``L`` tokens of a micro-batch, ``T`` tokens of a layer's router, ``K`` experts of a token, ``E`` experts of a layer.
"""

from __future__ import annotations

import torch

from agentrl.learner.device import to_device


def by_layer(experts_L: torch.Tensor, part: slice, device: torch.device) -> torch.Tensor:
    """Return the experts ``[layers, T, K]`` of a part of the tokens, from ``[L, layers, K]`` on the CPU."""
    return to_device(experts_L[part].transpose(0, 1).contiguous(), device)


def replay_experts(given_T_K: torch.Tensor, own_T_K: torch.Tensor, scores_T_E: torch.Tensor) -> torch.Tensor:
    """Return int64 experts ``[T, K]``: those given, and the router's choice where they are no numbers of experts."""
    known = given_T_K < scores_T_E.shape[1]
    return torch.where(known, given_T_K.to(own_T_K.dtype), own_T_K)
