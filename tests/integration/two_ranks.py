"""A learner rank in a separate process, which computes the gradient of many batches without taking a step.

The calling test writes ``work.pt``: the model's folder and the batches, for each of which there is an ``algo`` section and
both ranks' shares. Rank 0 writes the metrics to ``found.pt``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.batch_loss import BatchLoss
from agentrl.learner.fsdp.rank import FsdpRank

CONFIG = LearnerConfig(precision="float32", device="cpu", threads=1, optimizer=OptimizerConfig(max_grad_norm=1e9))


@dataclass(frozen=True)
class Work:
    """What ranks compute."""

    model: Path
    reference: Path
    cases: Sequence[tuple[AlgoConfig, GlobalBatch]]


def compute(rank: FsdpRank, algo: AlgoConfig, share: GlobalBatch) -> Mapping[str, float]:
    """Return the metrics of one optimizer step at learning rate 0."""
    assert share.lr_scale == 0
    rank.loss = BatchLoss(algo, rank.device)
    return rank.train_step(share)


def make_rank(work: Work) -> FsdpRank:
    """Return the rank, with a reference, for every ``algo`` section."""
    algo = work.cases[0][0].model_copy(update={"kl_coef": 1.0})
    return FsdpRank(work.model, CONFIG, algo, device=torch.device("cpu"), seed=0, reference=work.reference)


def main() -> int:
    """Compute with ``sys.argv``: the folder, the rank."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=number, world_size=2)
    work: Work = torch.load(folder / "work.pt", weights_only=False)
    rank = make_rank(work)
    found = [compute(rank, algo, batch_of_rank(batch, number)) for algo, batch in work.cases]
    if number == 0:
        torch.save(found, folder / "found.pt")
    rank.close()
    return 0


def batch_of_rank(batch: GlobalBatch, number: int) -> GlobalBatch:
    """Return the share of a rank, as the driver sends it."""
    return GlobalBatch(
        (batch.micro[number],),
        batch.kind,
        batch.temperature,
        batch.lr_scale,
        batch.sequence_sizes,
        batch.divided_sequences,
    )
