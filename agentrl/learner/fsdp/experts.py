"""Experts of models of transformers: grouped products, and routing replay, in which routers take given experts.

Legend: ``T`` tokens, ``K`` experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch

from agentrl.learner.layers import decoder_layers
from agentrl.learner.routing_replay import replay_experts
from agentrl.models.routing import REPLAYED

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


def accept_replayed_experts(hf: Any) -> None:
    """Have layers with experts take the argument ``replayed_experts``, ``[T, K]``. Call before layers are compiled."""
    if hf.config.model_type in REPLAYED:
        for layer in decoder_layers(hf):
            if hasattr(layer.mlp, "experts"):
                layer.forward = MethodType(_forward_layer, layer)


def pass_experts_by_layer(hf: Any) -> None:
    """Pass each layer its experts from ``[layers, T, K]``. Call after layers are compiled, which they are once for all."""
    if hf.config.model_type in REPLAYED:
        for number, layer in enumerate(decoder_layers(hf)):
            layer.forward = partial(_run_layer, layer.forward, number, hasattr(layer.mlp, "experts"))


def _run_layer(
    run: Callable[..., Any],
    number: int,
    has_experts: bool,
    *args: Any,
    replayed_experts: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    if replayed_experts is not None and has_experts:
        options["replayed_experts"] = replayed_experts[number]
    return run(*args, **options)


def _forward_layer(
    layer: Any, hidden: torch.Tensor, *args: Any, replayed_experts: torch.Tensor | None = None, **options: Any
) -> Any:
    """Compute a decoder layer, whose order of operations all `REPLAYED` models have."""
    if replayed_experts is None:
        return type(layer).forward(layer, hidden, *args, **options)
    attended, _ = layer.self_attn(layer.input_layernorm(hidden), *args, **options)
    hidden = hidden + attended
    return hidden + _mixture(layer.mlp, layer.post_attention_layernorm(hidden), replayed_experts)


def _mixture(mixture: Any, hidden: torch.Tensor, experts_T_K: torch.Tensor) -> torch.Tensor:
    """Compute a mixture of experts with given experts."""
    flat = hidden.flatten(0, -2)
    index, weights = _route(mixture.gate, flat, experts_T_K)
    result: torch.Tensor = mixture.experts(flat, index, weights).view_as(hidden)
    return result + mixture.shared_experts(hidden) if hasattr(mixture, "shared_experts") else result


def _route(router: Any, hidden: torch.Tensor, experts_T_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts ``[T, K]``, and weights that the router's scores give them."""
    logits, weights, chosen = router(hidden)
    index = replay_experts(experts_T_K, chosen, logits)
    return index, _weights(router, logits.float(), index).to(weights.dtype)


def _weights(router: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the weights ``[T, K]`` of experts, as the router computes those of its choice."""
    if not hasattr(router, "e_score_correction_bias"):
        # A softmax of the chosen logits is one of all, normalised. Improbable experts would have a sum near 0.
        return logits.gather(1, index).softmax(-1) if router.norm_topk_prob else logits.softmax(-1).gather(1, index)
    chosen = logits.sigmoid().gather(1, index)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights: torch.Tensor = chosen * router.routed_scaling_factor
    return weights
