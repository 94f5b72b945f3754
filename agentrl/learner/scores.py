"""Scores of the tokens of micro-batches, for every learner backend: where they are, by row, and by sequence.

Legend: ``N`` tokens of a micro-batch that are scored, ``S`` sequences of the global batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from agentrl.batch.microbatch import GlobalBatch, MicroBatch, to_device
from agentrl.learner.base import RowScores


class SequenceRatios:
    """The mean log-ratio of each sequence, which losses cannot compute where its parts are on other ranks.

    Args:
        batch: with divided sequences.
        device: of the log-ratios.
    """

    def __init__(self, batch: GlobalBatch, device: torch.device) -> None:
        self._sizes_S = to_device(torch.tensor(batch.sequence_sizes), device)
        self._sums_S = torch.zeros(len(batch.sequence_sizes), dtype=torch.float64, device=device)
        self._numbers: list[torch.Tensor] = []
        self._dtype = torch.float32

    def add(self, log_ratio_N: torch.Tensor, sequence_N: torch.Tensor) -> None:
        """Add what `BatchLoss.log_ratio` returned of a micro-batch."""
        self._sums_S.index_add_(0, sequence_N, log_ratio_N.double())
        self._numbers.append(sequence_N)
        self._dtype = log_ratio_N.dtype

    def reduce(self, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
        """Return, for each micro-batch, the mean log-ratio of each token's sequence, ``[N]``. Collective.

        Args:
            group: ranks that together have each token once; None are all.
        """
        dist.all_reduce(self._sums_S, group=group)
        means_S = (self._sums_S / self._sizes_S).to(self._dtype)
        return [means_S[sequence_N] for sequence_N in self._numbers]


def mask_positions(micro: MicroBatch) -> torch.Tensor:
    """Return the positions at the loss mask, int64 ``[N]`` on the CPU."""
    at_N = micro.mask_L.nonzero()[:, 0]
    assert bool((micro.position_ids_L[at_N] > 0).all()), "a row's first token cannot be trained on"
    return at_N


def score_positions(micro: MicroBatch) -> torch.Tensor:
    """Return the positions of tokens that have a score: all but the first of each row, int64 on the CPU."""
    return ((micro.row_L >= 0) & (micro.position_ids_L > 0)).nonzero()[:, 0]


def by_row(micro: MicroBatch, at_N: torch.Tensor, scores_N: torch.Tensor) -> RowScores:
    """Return scores at positions by row, 0 elsewhere."""
    flat_L = torch.zeros(micro.row_L.numel())
    flat_L[at_N] = scores_N.float().cpu()
    lengths = torch.bincount(micro.row_L[micro.row_L >= 0], minlength=len(micro.keys)).tolist()
    rows = torch.split(flat_L[: sum(lengths)], lengths)  # one after the other, before the padding
    return {key: row_T.numpy() for key, row_T in zip(micro.keys, rows, strict=True)}
