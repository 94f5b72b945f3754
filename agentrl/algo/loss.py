"""What every loss is given and returns."""

from __future__ import annotations

from dataclasses import dataclass, field

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
