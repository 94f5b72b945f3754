"""The figures of a step: collected a micro-batch at a time, added up over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.algo.base import LossMetrics, Selected
from agentrl.batch.microbatch import MicroBatch


def at_mask(batch: MicroBatch) -> torch.Tensor:
    """Return the flat positions at the loss mask, int64 ``[N]`` on the CPU."""
    at_N = batch.mask_R_L.reshape(-1).nonzero()[:, 0]
    assert bool((batch.position_ids_R_L.reshape(-1)[at_N] > 0).all()), "a row's first token cannot be trained on"
    return at_N


def select(
    batch: MicroBatch, at_N: torch.Tensor, device: torch.device, reference_logprobs_N: torch.Tensor | None
) -> Selected:
    """Return the fields at the flat positions ``at_N``, on ``device``; those of the reference are there already."""

    def pick(values_R_L: torch.Tensor) -> torch.Tensor:
        return values_R_L.reshape(-1)[at_N].to(device)

    return Selected(pick(batch.weight_R_L), pick(batch.advantages_R_L), pick(batch.logprobs_R_L), reference_logprobs_N)


class StepFigures:
    """Adds up what micro-batches report. Adding moves nothing off the device; only `reduce` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def add(self, loss: torch.Tensor, entropy_N: torch.Tensor, metrics: LossMetrics) -> None:
        """Take in one micro-batch: its loss sum, the entropy of each trained token's distribution, its metrics."""
        self._tokens += len(entropy_N)
        for into, values in (
            (self._sums, {"entropy": entropy_N.sum(), **metrics.sums}),
            (self._totals, {"loss": loss.detach(), **metrics.totals}),
        ):
            for name, value in values.items():
                into[name] = into.get(name, torch.zeros_like(value)) + value
        for name, value in metrics.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def count(self, name: str, number: int) -> None:
        """Take in a number of this rank's, logged as the sum over ranks; every rank must give one."""
        self._totals[name] = torch.tensor(float(number), device=self._device)

    def reduce(self) -> dict[str, float]:
        """Return ``train/…`` figures over all ranks: totals such as the loss as sums, else means a token, or maxima."""
        added = self._sums | self._totals
        names = sorted(added)
        sums = torch.stack([added[name].double() for name in names])
        sums = torch.cat([sums, torch.tensor([float(self._tokens)], dtype=torch.float64, device=self._device)])
        dist.all_reduce(sums)
        tokens = sums[-1].item()
        figures = {"train/trained_tokens": tokens}
        for name, value in zip(names, sums.tolist(), strict=False):
            figures[f"train/{name}"] = value if name in self._totals else value / max(tokens, 1.0)
        if self._maxima:
            tops = sorted(self._maxima)
            values = torch.stack([self._maxima[name].double() for name in tops])
            dist.all_reduce(values, dist.ReduceOp.MAX)
            figures |= {f"train/{name}": value for name, value in zip(tops, values.tolist(), strict=True)}
        return figures
