"""The loss of micro-batches from the scores of their tokens, for every learner backend.

Legend: ``N`` tokens at the loss mask of a micro-batch, ``S`` sequences of the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from agentrl.algo.base import LossInput, LossMetrics
from agentrl.algo.registry import make_losses, make_objective, needs_whole_sequences
from agentrl.batch.microbatch import GlobalBatch, MicroBatch
from agentrl.config.algo import AlgoConfig
from agentrl.learner.base import RowScores
from agentrl.learner.device import to_device


class BatchLoss:
    """The losses of ``rl``, ``sft`` and ``value`` batches.

    Args:
        algo: configures the loss of ``rl`` batches.
        device: of the scores.
    """

    def __init__(self, algo: AlgoConfig, device: torch.device) -> None:
        self.algo = algo
        self.device = device
        self.objective = make_objective(algo)
        self.losses = make_losses(algo, self.objective)

    def needs_reference(self, batch: GlobalBatch) -> bool:
        """Return whether the loss needs the reference policy's log-probabilities."""
        return batch.kind == "rl" and self.algo.has_kl and self.algo.kl_in != "reward"

    def needs_ratios(self, batch: GlobalBatch, *, divides_rows: bool = False) -> bool:
        """Return whether the loss needs `SequenceRatios`: parts of sequences are in other micro-batches, or on other ranks.

        Args:
            batch: whose micro-batches may divide sequences.
            divides_rows: whether ranks score parts of rows.
        """
        return batch.kind == "rl" and (batch.divided_sequences or divides_rows) and needs_whole_sequences(self.algo)

    def __call__(
        self,
        batch: GlobalBatch,
        micro: MicroBatch,
        at_N: torch.Tensor,
        scores: tuple[torch.Tensor, torch.Tensor | None],
        *,
        reference_N: torch.Tensor | None = None,
        ratio_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """Return ``Σ weight · loss`` over tokens of a micro-batch, a scalar, and its metrics.

        Args:
            batch: of the micro-batch.
            micro: on the CPU.
            at_N: positions at the loss mask, int64 on the CPU.
            scores: log-probabilities or values of these tokens on the device, with gradient, and entropies.
            reference_N: the reference policy's log-probabilities, if `needs_reference`.
            ratio_N: of `SequenceRatios`, if `needs_ratios`.
        """
        scores_N, entropy_N = scores
        loss_input = LossInput(
            **self._fields(batch, micro, at_N),
            sequence_log_ratio_N=ratio_N,
            reference_logprobs_N=reference_N,
            entropy_N=entropy_N if self.algo.needs_entropy else None,
        )
        loss, metrics = self.losses[batch.kind](scores_N, loss_input)
        if entropy_N is not None:
            metrics.sums["entropy"] = entropy_N.detach().sum()
        return loss, metrics

    def log_ratio(
        self, batch: GlobalBatch, micro: MicroBatch, at_N: torch.Tensor, logprobs_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-ratio of each token, ``[N]`` without gradient, and the number of its sequence, int64 ``[N]``."""
        loss_input = LossInput(**self._fields(batch, micro, at_N))
        assert loss_input.sequence_N is not None
        return logprobs_N - self.objective.old_logprobs(logprobs_N, loss_input), loss_input.sequence_N

    def _fields(self, batch: GlobalBatch, micro: MicroBatch, at_N: torch.Tensor) -> dict[str, Any]:
        """Return the fields of a `LossInput` that the driver set, at these positions and on the device."""
        fields = {
            "weight_N": micro.weight_L,
            "advantages_N": micro.advantages_L,
            "logprobs_N": micro.logprobs_L,
            "learner_logprobs_N": micro.learner_logprobs_L,
            "correction_N": micro.correction_L,
            "values_N": micro.values_L,
            "returns_N": micro.returns_L,
        }
        chosen = {name: None if values is None else values[at_N] for name, values in fields.items()}
        numbers = torch.tensor(micro.sequences, dtype=torch.int64)
        chosen["sequence_N"] = numbers[micro.row_L[at_N].long()]
        chosen["sequence_size_N"] = torch.tensor(batch.sequence_sizes, dtype=torch.float32)[chosen["sequence_N"]]
        loss_fields: dict[str, Any] = {
            name: None if values_N is None else to_device(values_N, self.device) for name, values_N in chosen.items()
        }
        loss_fields["source_tokens"], loss_fields["sequences"] = (
            self._source_tokens(micro, at_N),
            len(batch.sequence_sizes),
        )
        return loss_fields

    def _source_tokens(self, micro: MicroBatch, at_N: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the indices of each source's tokens among those at the mask; see `LossInput.source_tokens`."""
        source_N = torch.tensor(micro.sources)[micro.row_L[at_N].long()] if micro.sources else at_N[:0]
        places = {number: (source_N == number).nonzero()[:, 0] for number in sorted({*source_N.tolist()})}
        return {number: to_device(at_M, self.device) for number, at_M in places.items()}


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
    return {key: flat_L[micro.row_L == number].numpy() for number, key in enumerate(micro.keys)}
