"""The algorithm contract: advantages from rewards, and the input and metrics of every loss.

Legend: ``N`` tokens at the loss mask, or rollouts where rewards are meant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from agentrl.batch.groups import RolloutGroups


@dataclass(frozen=True, slots=True)
class LossInput:
    """The fields of a micro-batch at its loss mask, on the device; all float32 ``[N]``."""

    weight_N: torch.Tensor
    """Each token's share of the global batch; the driver has already divided by the denominator."""
    advantages_N: torch.Tensor
    """0 in supervised batches."""
    logprobs_N: torch.Tensor
    """The sampler's log-probabilities, at the learner's temperature; 0 in supervised batches."""
    reference_logprobs_N: torch.Tensor | None = None
    """The reference policy's, at the same temperature; None where the algorithm needs none."""
    entropy_N: torch.Tensor | None = None
    """Entropies (nats) of the learner's distributions, with a gradient; None where the algorithm needs none."""


@dataclass(slots=True)
class LossMetrics:
    """Metrics of one micro-batch as scalars without gradient, in a form that adds up over micro-batches and ranks."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over tokens; divided by the number of tokens of the global batch for the log."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums weighted like the loss; logged as they are."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maxima; without any token they hold the smallest possible value."""


class Algorithm(Protocol):
    """Computes advantages from rewards (on the driver) and a loss from log-probabilities (on every rank)."""

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

    def loss(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return ``Σ weight · loss`` over the mask, a scalar, and its metrics."""
        ...


def rollout_advantages(algorithm: Algorithm, groups: RolloutGroups) -> dict[str, float]:
    """Return the advantage of every rollout by its ``rollout_id``."""
    advantages_N = algorithm.advantages(torch.from_numpy(groups.rewards_N), torch.from_numpy(groups.groups_N))
    ids = (rollout.rollout_id for rollout in groups.rollouts_N)
    return dict(zip(ids, advantages_N.tolist(), strict=True))
