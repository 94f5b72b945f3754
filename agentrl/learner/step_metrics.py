"""Metrics of an optimizer step, accumulated over micro-batches and reduced over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.algo.base import LossMetrics
from agentrl.algo.correction import effective_sample_size


class StepMetrics:
    """Accumulates the metrics of micro-batches on the device; only `reduce` synchronizes with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, torch.Tensor] = {}
        self._totals: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._weights: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def add(self, loss: torch.Tensor, tokens: int, metrics: LossMetrics) -> None:
        """Add one micro-batch: its summed loss, the number of its trained tokens, its metrics."""
        self._tokens += tokens
        for into, values in (
            (self._sums, metrics.sums),
            (self._totals, {"loss": loss.detach(), **metrics.totals}),
            (self._weights, metrics.weights),
        ):
            for name, value in values.items():
                into[name] = into.get(name, torch.zeros_like(value)) + value
        for name, value in metrics.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def reduce(self, group: dist.ProcessGroup | None = None, scale: float = 1.0) -> dict[str, float]:
        """Return ``train/…`` metrics over ranks: totals such as the loss as sums, else means per token, maxima, or effective
        sample sizes. Collective.

        Args:
            group: ranks that together have each token once; None are all.
            scale: factor of the totals; see `GlobalBatch.gradient_scale`.
        """
        added = self._sums | self._totals
        names = sorted(added)
        sums = torch.stack([added[name].double() for name in names])
        weighted = sorted(self._weights)
        sums = torch.cat(
            [
                sums,
                *(self._weights[name].double() for name in weighted),
                torch.tensor([float(self._tokens)], dtype=torch.float64, device=self._device),
            ]
        )
        dist.all_reduce(sums, group=group)
        values = sums.tolist()
        tokens, weights = values[-1], values[len(names) : -1]
        reduced = {"train/trained_tokens": tokens}
        for name, value in zip(names, values, strict=False):
            reduced[f"train/{name}"] = value * scale if name in self._totals else value / max(tokens, 1.0)
        for name, total, squares in zip(weighted, weights[::2], weights[1::2], strict=True):
            reduced[f"train/{name}"] = effective_sample_size(total, squares, tokens)
        if self._maxima:
            tops = sorted(self._maxima)
            maxima = torch.stack([self._maxima[name].double() for name in tops])
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
            reduced |= {f"train/{name}": value for name, value in zip(tops, maxima.tolist(), strict=True)}
        return reduced
