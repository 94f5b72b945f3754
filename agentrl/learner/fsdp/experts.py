"""Experts of models of transformers as grouped products, in bfloat16 where linears are computed in it."""

from __future__ import annotations

from typing import Any

import torch

_IMPLEMENTATION = "agentrl_grouped"
"""Name of the experts' implementation, for transformers."""


def use_grouped_products(hf: Any) -> None:
    """Have the experts of a model computed as grouped products, if it has experts that transformers can compute so."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if hf._can_set_experts_implementation():
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
        hf.set_experts_implementation(_IMPLEMENTATION)


class _InBfloat16:
    """Experts whose weights are read in bfloat16: autocast casts those of linears, not those of grouped products."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(torch.bfloat16) if isinstance(value, torch.Tensor) else value


def _forward(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute a layer's experts. Float32 products would be a loop over experts, with a wait of the host in each layer."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    if torch.is_autocast_enabled(hidden.device.type):
        experts, hidden = _InBfloat16(experts), hidden.to(torch.bfloat16)
    result: torch.Tensor = grouped_mm_experts_forward(experts, hidden, index, weights)
    return result
