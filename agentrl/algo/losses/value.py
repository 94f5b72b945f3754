"""The loss of a critic's values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.base import LossInput, LossMetrics


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``Σ weight · max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2`` with returns R.

    Without clipping it is half the squared error (Schulman et al., arXiv:1707.06347, equation 9); the clipped form is that of
    OpenAI's PPO (Engstrom et al., arXiv:2005.12729, section 3), as in TRL and verl.
    """

    clip: float | None
    """Largest change ``c`` of a value in a training step that the loss rewards; None does not clip."""

    def __call__(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss of values, which take the place of log-probabilities, and its metrics."""
        values_N, returns_N = logprobs_N, inputs.returns_N
        assert returns_N is not None, "the batch has no returns"
        errors_N = (values_N - returns_N).square()
        clipped_N = torch.zeros_like(errors_N, dtype=torch.bool)
        if self.clip is not None:
            assert inputs.values_N is not None, "the batch has no values of the critic before the training step"
            near_N = torch.clamp(values_N, inputs.values_N - self.clip, inputs.values_N + self.clip)
            clipped_errors_N = (near_N - returns_N).square()
            clipped_N = (clipped_errors_N > errors_N).detach()
            errors_N = torch.maximum(errors_N, clipped_errors_N)
        sums = {"mean": values_N.detach().sum(), "clip_fraction": clipped_N.sum().float()}
        return (inputs.weight_N * errors_N).sum() / 2, LossMetrics(sums=sums)
