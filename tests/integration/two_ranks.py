"""A learner rank in a separate process, which computes the gradient of many batches without taking a step.

The calling test writes ``work.pt``: the models' folders, configurations of learners and for each the batches, with an ``algo``
section and all shares. Each rank writes what it found to ``found0.pt``, ``found1.pt`` and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from agentrl.algo.batch_loss import BatchLoss
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RankOptions, RowLogprobs
from agentrl.learner.fsdp.rank import FsdpRank

CONFIG = LearnerConfig(precision="float32", device="cpu", threads=1, optimizer=OptimizerConfig(max_grad_norm=1e9))

Cases = Sequence[tuple[AlgoConfig, GlobalBatch]]


@dataclass(frozen=True)
class Work:
    """What ranks compute."""

    model: Path
    reference: Path
    learners: Sequence[tuple[LearnerConfig, Cases]]
    """Learners of as many ranks, one after the other, and the cases of each."""


@dataclass(frozen=True)
class Found:
    """What one rank of a learner found."""

    metrics: list[Mapping[str, float]]
    """Of every case."""
    logprobs: RowLogprobs
    """Of the rows of the last case."""


def compute(rank: FsdpRank, algo: AlgoConfig, share: GlobalBatch) -> Mapping[str, float]:
    """Return the metrics of one optimizer step at learning rate 0."""
    assert share.lr_scale == 0
    rank.loss = BatchLoss(algo, rank.device)
    return rank.train_step(share)


def main() -> int:
    """Compute with ``sys.argv``: the folder, the rank."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    work: Work = torch.load(folder / "work.pt", weights_only=False)
    ranks = work.learners[0][0].ranks
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=number, world_size=ranks)
    outcomes = []
    for config, cases in work.learners:
        # With a reference, for every ``algo`` section.
        algo = cases[0][0].model_copy(update={"kl_coef": 1.0})
        rank = FsdpRank(
            RankOptions(work.model, config, algo, device=torch.device("cpu"), seed=0, reference=work.reference)
        )
        metrics = [compute(rank, algo, batch_of_share(batch, rank.data_parallel_rank)) for algo, batch in cases]
        outcomes.append(Found(metrics, rank.logprobs(batch_of_share(cases[-1][1], rank.data_parallel_rank))))
    torch.save(outcomes, folder / f"found{number}.pt")
    rank.close()
    return 0


def batch_of_share(batch: GlobalBatch, number: int) -> GlobalBatch:
    """Return a batch with one of its shares, as the driver sends it to ranks."""
    return replace(batch, micro=(batch.micro[number],))
