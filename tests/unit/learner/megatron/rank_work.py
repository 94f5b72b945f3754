"""What learners of the tests compute: models, layouts, losses and batches. Imports no Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.core.types import RowKey
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_rows
from tests.unit.learner.megatron.models import EP, PP, SP, TP, VPP

LENGTHS = (30, 50, 20, 7)
ALGOS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "entropy_coef": 0.1},
    "gspo": {"loss": {"name": "gspo", "options": {"clip_low": 0.9, "clip_high": 9.0}}},
}
ONE: dict[str, dict[str, Any]] = {"one rank": {}}
TWO: dict[str, dict[str, Any]] = {
    "DP2": {},
    "DP2, overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "TP2": TP,
    "TP2, SP": TP | SP,
    "PP2": PP,
    "CP2": {"context_parallel_size": 2},
    "PP2, VPP2": PP | VPP,
}
TWO_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "EP2": EP,
    "TP2, SP, EP2, ETP1": TP | SP | EP | {"expert_tensor_parallel_size": 1},
}
FOUR: dict[str, dict[str, Any]] = {"TP2, SP, PP2": TP | SP | PP}
RESUMED = {"TP2, SP": TP | SP, "PP2": PP, "DP2": {}}
"""The first writes a checkpoint that the others load."""
MODELS = {"qwen3": "qwen3", "experts": "qwen3_moe", "tied": "qwen2"}


@dataclass
class Found:
    """What a learner computed."""

    metrics: dict[str, dict[str, float]]
    """Of a step with each loss, one after the other."""
    logprobs: dict[RowKey, NDArray[np.float32]]
    """Before the steps."""


def learner_config(backend: str, options: dict[str, Any] | None = None, ranks: int = 1) -> LearnerConfig:
    """The configuration of a learner."""
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=5.0)
    return LearnerConfig(
        backend=backend, ranks=ranks, device="cpu", threads=1, precision="float32", optimizer=optimizer,
        megatron=options or {}, logits_chunk=16,
    )  # fmt: skip


def algo_of(name: str) -> AlgoConfig:
    return make_algo(**ALGOS[name])


def make_batch(shares: int) -> GlobalBatch:
    """Return rows of a few agents, of which each has several: sequences are divided among micro-batches and shares."""
    rows = make_rows(LENGTHS)
    rows = [replace(row, key=RowKey("p", f"r{n % 2}", row=n)) for n, row in enumerate(rows)]
    rng = np.random.default_rng(1)
    advantages = {row.key.rollout_id: float(rng.normal()) for row in rows}
    return pack(rows, advantages, shares=shares, tokens_per_micro=64, pad_id=0)


def compute(rank: Any, shares: int) -> Found:
    """Compute all losses with a rank or a local learner's, which has a reference."""
    from agentrl.learner.batch_loss import BatchLoss

    def share_of(batch: GlobalBatch) -> GlobalBatch:
        return replace(batch, micro=(batch.micro[rank.share],), metrics={})

    batch = share_of(make_batch(shares))
    logprobs, metrics = rank.logprobs(batch), {}
    for name in ALGOS:
        rank.loss = BatchLoss(algo_of(name), rank.device)
        metrics[name] = rank.train_step(batch)
    return Found(metrics, logprobs)


def make_rank(folder: Path, cls: Any, config: LearnerConfig) -> Any:
    """Make a rank with a reference."""
    return cls(
        folder, config, algo_of("grpo"), device=torch.device("cpu"), seed=0, reference=folder.parent / "reference"
    )
