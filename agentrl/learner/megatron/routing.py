"""Routing replay in Megatron-Core models: routers take given experts, with weights from their scores.

Experts come with the packed tokens to each layer and, in the place of its padding mask, to its router: what is computed again
in the backward pass gets the same ones. Legend: ``T`` tokens of a router, ``K`` experts of a token, ``E`` experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from agentrl.learner.megatron.layers import PackedTokens
from agentrl.learner.routing import replay_experts

_Choice = tuple[torch.Tensor, torch.Tensor]
"""Scores and numbers ``[T, K]`` of experts."""


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer with experts."""

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **options: Any) -> Any:
        """Compute the layer with its part of the given experts."""
        experts = packed_seq_params.experts
        options["padding_mask"] = None if experts is None else experts[self.layer_number - 1]
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class RoutedMixture(MoELayer):  # type: ignore[misc]
    """A mixture of experts whose router may be given the experts."""

    def forward(self, hidden: torch.Tensor, intermediate: None = None, padding_mask: torch.Tensor | None = None) -> Any:
        """Compute the mixture; ``padding_mask`` is the given experts, ``[T, K]``."""
        self.router.router_replay.given = padding_mask
        return super().forward(hidden, intermediate)


def replay_routing(mixture: MoELayer) -> None:
    """Have a mixture's router take given experts. Megatron-Core refuses other classes than its own before."""
    mixture.__class__ = RoutedMixture
    mixture.router.router_replay = _GivenExperts()


class _GivenExperts:
    """The choice of a router's experts, in Megatron-Core's place for a ``RouterReplay``."""

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores_T_E: torch.Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., _Choice],
    ) -> _Choice:
        """Return scores and numbers of the experts that were given; where none were, those that the router chooses."""
        scores, own = choose(scores_T_E, topk, groups, group_topk)
        if self.given is None:
            return scores, own
        index = replay_experts(self.given, own, scores_T_E)
        return scores_T_E.gather(1, index), index
