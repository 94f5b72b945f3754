"""The figures of a step: collected a micro-batch at a time, added up over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.algo.loss import LossMetrics, Selected
from agentrl.batch.microbatch import MicroBatch


def select(batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, Selected]:
    """Return the flat positions ``[N]`` at the loss mask, and the fields there, on ``device``."""
    at_N = batch.mask_R_L.reshape(-1).nonzero()[:, 0]
    assert bool((batch.position_ids_R_L.reshape(-1)[at_N] > 0).all()), "a row's first token cannot be trained on"

    def pick(values_R_L: torch.Tensor) -> torch.Tensor:
        return values_R_L.reshape(-1)[at_N].to(device)

    return at_N.to(device), Selected(pick(batch.weight_R_L), pick(batch.advantages_R_L), pick(batch.logprobs_R_L))


class StepFigures:
    """Adds up what micro-batches report. Adding moves nothing off the device; only `reduce` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def add(self, loss: torch.Tensor, entropy_N: torch.Tensor, metrics: LossMetrics) -> None:
        """Take in one micro-batch: its loss sum, the entropy of each trained token's distribution, its metrics."""
        self._tokens += len(entropy_N)
        sums = {"loss": loss.detach(), "entropy": entropy_N.sum(), **metrics.sums}
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        for name, value in metrics.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def reduce(self) -> dict[str, float]:
        """Return ``train/…`` figures over all ranks: the loss as a sum, else means a token, or maxima."""
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name].double() for name in names])
        sums = torch.cat([sums, torch.tensor([float(self._tokens)], dtype=torch.float64, device=self._device)])
        dist.all_reduce(sums)
        tokens = sums[-1].item()
        figures = {"train/trained_tokens": tokens}
        for name, value in zip(names, sums.tolist(), strict=False):
            figures[f"train/{name}"] = value if name == "loss" else value / max(tokens, 1.0)
        if self._maxima:
            tops = sorted(self._maxima)
            values = torch.stack([self._maxima[name].double() for name in tops])
            dist.all_reduce(values, dist.ReduceOp.MAX)
            figures |= {f"train/{name}": value for name, value in zip(tops, values.tolist(), strict=True)}
        return figures
