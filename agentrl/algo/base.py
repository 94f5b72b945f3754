"""The algorithm contract, and what every loss takes and returns.

Legend: ``N`` tokens at the loss mask, or rollouts where rewards are meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Selected:
    """The fields of a micro-batch at its loss mask; all float32 ``[N]``."""

    weight_N: torch.Tensor
    """Each token's share of the global batch; the driver has divided by the denominator already."""
    advantages_N: torch.Tensor
    """0 in supervised batches."""
    logprobs_N: torch.Tensor
    """The sampler's log-probabilities, at the temperature of the learner's; 0 in supervised batches."""
    reference_logprobs_N: torch.Tensor | None = None
    """The reference policy's, at the same temperature; None where the algorithm needs none."""
    entropy_N: torch.Tensor | None = None
    """Entropies (nats) of the learner's distributions, with a gradient; None where the algorithm needs none."""


@dataclass(slots=True)
class LossMetrics:
    """Figures of one micro-batch as scalars without gradient, in a form that adds up over micro-batches and ranks."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over tokens; divided by the number of tokens of the global batch for the log."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums weighted as the loss is; logged as they are."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Largest values; present also where there is no token, as the least value that they can have."""


class Algorithm(Protocol):
    """Turns rewards into advantages (on the driver) and log-probabilities into a loss (on every rank)."""

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads ``reference_logprobs_N``."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether `loss` reads ``entropy_N``."""
        ...

    def advantages(self, rewards_N: torch.Tensor, groups_N: torch.Tensor) -> torch.Tensor:
        """Return one float32 advantage a rollout, ``[N]``; ``groups_N`` are int64 group numbers from 0."""
        ...

    def loss(self, logprobs_N: torch.Tensor, selected: Selected) -> tuple[torch.Tensor, LossMetrics]:
        """Return ``Σ weight · loss`` over the mask, a scalar, and what to log of it."""
        ...
