"""Ranks of the FSDP2 learner that divide experts, and what they compute.

The calling test writes models into the folder. Rank 0 writes what the learners found to ``found.pt``: by case.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RankOptions
from agentrl.learner.export import WeightExporter
from agentrl.learner.fsdp.experts import expert_modules
from agentrl.learner.fsdp.rank import FsdpRank
from agentrl.learner.fsdp.weights import local
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch

LENGTHS = (30, 50, 20, 7, 41)
EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}
Cases = Mapping[str, tuple[int, str, Mapping[str, object]]]
"""By name: ranks, model, and options of the learner."""
CASES: Cases = {
    "2 ranks": (2, "qwen3_moe", EP2 | {"recompute": "full"}),
    "4 ranks, biases": (4, "gpt_oss", EP2 | {"recompute": "selective", "reshard_after_forward": True}),
    "4 ranks, two copies": (4, "qwen3_moe", EP2 | {"replicas": 2}),
}
LONG: Cases = {
    "4 ranks, one column": (4, "qwen3_moe", EP4),
    "4 ranks, shared experts": (4, "deepseek_v3", EP2),
    "4 ranks, parts of rows": (4, "qwen3_moe", EP2 | {"context_parallel": 2}),
    "4 ranks, optimizer on CPU": (4, "qwen3_moe", EP2 | {"cpu_offload": "optimizer"}),
}
"""Under `make test-long` only."""


@dataclass(frozen=True)
class Found:
    """What a learner found in two steps."""

    metrics: list[Mapping[str, float]]
    weights: Mapping[str, torch.Tensor]
    """After the steps."""
    small: Mapping[str, torch.Tensor]
    """The same in many buckets."""
    experts: list[tuple[int, int]]
    """Of each fused weight of experts, how many experts this rank computes, and how many it keeps."""


def learner_config(*, state: Literal["float32", "8bit"] = "float32", **options: object) -> LearnerConfig:
    """Return the configuration of a learner whose steps clip gradients, with an optimizer ``state``."""
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=0.5, eps=1e-5, state=state)
    options = {"precision": "float32", "device": "cpu", "threads": 1} | options
    return LearnerConfig(**options, optimizer=optimizer)


def batch_of(shares: int, seed: int) -> GlobalBatch:
    """Return a batch with micro-batches of other sizes on each rank."""
    return make_batch(LENGTHS, seed=seed, shares=shares, micro=64)


def weights_of(rank: FsdpRank, bucket: int) -> dict[str, torch.Tensor]:
    """Return copies of all weights."""
    exporter = WeightExporter(rank)
    return {name: tensor.clone() for part in exporter.buckets(bucket) for name, tensor in part.tensors()}


def experts_of(rank: FsdpRank) -> list[tuple[int, int]]:
    """Return what `Found.experts` are. Collective."""
    counts = []
    for module in expert_modules(rank.model.hf):
        weight = module.down_proj
        kept = len(local(weight))
        module.unshard()
        counts.append((len(local(module.down_proj)), kept))
        module.reshard()
    return counts


def compute(folder: Path, name: str, case: tuple[int, str, Mapping[str, object]]) -> Found:
    """Take two steps, and save after the first; take the second one again from the checkpoint of a single rank."""
    ranks, family, options = case
    config = learner_config(ranks=ranks, **options)
    rank = FsdpRank(RankOptions(folder / family, config, make_algo(), device=torch.device("cpu"), seed=0))
    shares = ranks // config.context_parallel

    def step(seed: int) -> Mapping[str, float]:
        batch = batch_of(shares, seed)
        return rank.train_step(replace(batch, micro=(batch.micro[rank.data_parallel_rank],)))

    metrics = [step(0)]
    rank.save(folder / name)
    rank.finish_save()
    rank.sleep()
    rank.wake()
    metrics.append(step(1))
    found = Found(metrics, weights_of(rank, 1 << 40), weights_of(rank, 5000), experts_of(rank))
    rank.load(folder / f"one {family}")
    metrics.append(step(1))
    return found


def resume_8bit() -> int:
    """Take two steps with 8-bit moments; take the second one again from a checkpoint without a Hugging Face folder.

    Arguments as for `main`; the model is in ``qwen3_moe``. Both ranks compare the steps, and rank 0 writes the metrics.
    """
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=number, world_size=2)
    config = learner_config(ranks=2, state="8bit", save_hf=False, **EP2)
    options = RankOptions(folder / "qwen3_moe", config, make_algo(), device=torch.device("cpu"), seed=0)
    first, second = (replace(batch, micro=(batch.micro[number],)) for batch in (batch_of(2, 0), batch_of(2, 1)))
    rank = FsdpRank(options)
    metrics = [rank.train_step(first)]
    rank.save(folder / "checkpoint")
    rank.finish_save()
    metrics.append(rank.train_step(second))
    expected, resumed = weights_of(rank, 1 << 40), FsdpRank(options)
    resumed.load(folder / "checkpoint")
    assert resumed.train_step(second) == metrics[1]
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(resumed, 1 << 40).items())
    if number == 0:
        torch.save((metrics, expected), folder / "found.pt")
    dist.destroy_process_group()
    return 0


def main() -> int:
    """Compute with ``sys.argv``: the folder, the rank."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    cases: Cases = torch.load(folder / "cases.pt", weights_only=False)
    outcomes = {}
    for ranks in (2, 4):
        if number >= ranks:
            continue
        store = dist.FileStore(str(folder / f"store{ranks}"), ranks)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=number, world_size=ranks, timeout=limit)
        outcomes |= {name: compute(folder, name, case) for name, case in cases.items() if case[0] == ranks}
        dist.destroy_process_group()
    if number == 0:
        torch.save(outcomes, folder / "found.pt")
    return 0
