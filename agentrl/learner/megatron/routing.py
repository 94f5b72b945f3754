"""Routing replay in Megatron-Core models: routers use recorded experts, with weights from their own scores.

Experts come with the packed tokens to each layer and, in place of its padding mask, to its router:
recomputation in the backward pass gets the same experts.

Legend: ``T`` tokens of a router, ``K`` experts of a token, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
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
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class RoutedMixture(MoELayer):  # type: ignore[misc]
    """A mixture of experts whose router can use recorded experts."""

    def forward(self, hidden: torch.Tensor, intermediate: None = None, padding_mask: torch.Tensor | None = None) -> Any:
        """Compute the mixture; ``padding_mask`` has the recorded experts ``[T, K]``."""
        self.router.router_replay.experts = padding_mask
        return super().forward(hidden, intermediate)


def replay_routing(mixture: MoELayer) -> None:
    """Have a mixture's router use recorded experts. Called after construction: Megatron-Core refuses other classes."""
    mixture.__class__ = RoutedMixture
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
