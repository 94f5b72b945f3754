"""Routers of Megatron-Core models: they can use recorded experts, and their own losses are means.

Recorded experts get weights from the router's own scores. They come with the packed tokens to each layer and, in place of its
padding mask, to its router: recomputation in the backward pass gets the same experts.

Legend: ``T`` tokens of a router, ``K`` experts of a token, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from agentrl.learner.megatron.layers import PackedTokens
from agentrl.learner.routing_replay import replay_experts

_Choice = tuple[torch.Tensor, torch.Tensor]
"""Scores and numbers ``[T, K]`` of experts."""


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer with experts."""

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **options: Any) -> Any:
        """Compute the layer with the recorded experts of this layer."""
        experts = packed_seq_params.experts
        options["padding_mask"] = None if experts is None else experts[self.layer_number - 1]
        self.mlp.router.loss_weight = packed_seq_params.loss_weight
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class RoutedMixture(MoELayer):  # type: ignore[misc]
    """A mixture of experts whose router can use recorded experts."""

    def forward(self, hidden: torch.Tensor, intermediate: None = None, padding_mask: torch.Tensor | None = None) -> Any:
        """Compute the mixture; ``padding_mask`` has the recorded experts ``[T, K]``."""
        self.router.router_replay.experts = padding_mask
        return super().forward(hidden, intermediate)


class Router(TopKRouter):  # type: ignore[misc]
    """A router whose losses, of balance and of large logits, have the weight of the micro-batch in the optimizer step.

    Megatron-Core multiplies them by the number of tokens, and divides the gradient of all losses by it. agentrl's own loss has
    its denominators in the weights of tokens, and its gradient is not divided.
    """

    loss_weight: float = 0.0

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, *args: object, **options: object
    ) -> torch.Tensor:
        """Add the gradient of a loss of balance in the backward pass of the activation."""
        weighted: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * self.loss_weight)
        return weighted

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: None = None) -> torch.Tensor:
        """Add the gradient of the loss of large logits in their backward pass; its mean is over tensor and context ranks."""
        if self.config.moe_z_loss_coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        loss = z_loss_func(logits, self.config.moe_z_loss_coeff / self.tp_cp_group.size())
        weighted: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss * self.loss_weight)
        return weighted


def prepare_routing(mixture: MoELayer) -> None:
    """Have a mixture routed as this module says. Called after construction: Megatron-Core refuses other classes."""
    mixture.__class__ = RoutedMixture
    mixture.router.__class__ = Router
    mixture.router.router_replay = _ReplayedExperts()


class _ReplayedExperts:
    """The recorded experts of a router. Replaces Megatron-Core's ``RouterReplay``."""

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores_T_E: torch.Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., _Choice],
    ) -> _Choice:
        """Return scores and numbers of the recorded experts; for tokens without them, those that the router chooses."""
        scores, chosen = choose(scores_T_E, topk, groups, group_topk)
        if self.experts is None:
            return scores, chosen
        index = replay_experts(self.experts, chosen, scores_T_E)
        return scores_T_E.gather(1, index), index
