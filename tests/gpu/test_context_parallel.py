"""Ranks on two GPUs that compute each micro-batch together, against one rank on one. No engine takes part."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deadlines import wait_until
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RankOptions, RowLogprobs
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.fsdp.rank import FsdpRank
from tests.algo_config import make_algo
from tests.unit.learner.learners import SIZES, make_batch

pytestmark = pytest.mark.gpu

LENGTHS = (700, 90, 333, 64, 512, 17, 260, 1500)
PRECISIONS = ("float32", "bfloat16")
STEPS = 6
LIMIT_S = 240.0
"""For the ranks of one number. Ranks that wait for each other would never end."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What a learner found in one precision."""

    metrics: Mapping[str, float]
    logprobs: RowLogprobs
    step_s: float


def make_windowed(folder: Path) -> Path:
    """A model whose second layer has a sliding window, and whose key heads are fewer than its heads."""
    torch.manual_seed(7)
    sizes = SIZES | {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "max_position_embeddings": 4096,
    }
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 128}
    config = Qwen3Config(**sizes | {"initializer_range": 0.05}, **kinds, head_dim=64)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def batch() -> GlobalBatch:
    return replace(make_batch(LENGTHS, micro=2048), lr_scale=0.0)


def compute(rank: int, folder: str, ranks: int) -> None:
    """Write what ``ranks`` ranks find, which compute the only share together."""
    store = dist.FileStore(f"{folder}/store{ranks}", ranks)
    sizes = {"ranks": ranks, "context_parallel": ranks, "device": "cuda"}
    metrics_by_name = {}
    for number, precision in enumerate(PRECISIONS):
        # Compiling takes longer than all else here.
        more = {"precision": precision, "compile": precision == "bfloat16"}
        config = LearnerConfig(**sizes, **more, optimizer=OptimizerConfig(max_grad_norm=1e9))
        device = pick_device(config, local_rank=rank)
        if number == 0:
            dist.init_process_group(collectives("cuda"), store=store, rank=rank, world_size=ranks)
        learner = FsdpRank(
            RankOptions(Path(folder, "model"), config, make_algo(entropy_coef=0.1), device=device, seed=0)
        )
        rows, seconds = batch(), []
        for _ in range(STEPS):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            metrics = learner.train_step(rows)
            seconds.append(time.perf_counter() - begun)
        metrics_by_name[precision] = Found(metrics, learner.logprobs(rows), min(seconds))
    if rank == 0:
        torch.save(metrics_by_name, Path(folder, f"found{ranks}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Found]]:
    """By number of ranks and precision."""
    folder = tmp_path_factory.mktemp("context")
    make_windowed(folder / "model")
    for ranks in (1, 2):
        _log.warning("%d ranks compute", ranks)
        context = mp.spawn(compute, (str(folder), ranks), nprocs=ranks, join=False)  # type: ignore[no-untyped-call]
        try:
            wait_until(lambda context=context: context.join(timeout=1.0), LIMIT_S)
        finally:
            for process in context.processes:
                process.kill()
    return {ranks: torch.load(folder / f"found{ranks}.pt", weights_only=False) for ranks in (1, 2)}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are wanted")
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_two_gpus_have_the_loss_the_gradient_and_the_logprobs_of_one(of_ranks, precision, limit, figures):
    expected, actual = (of_ranks[ranks][precision] for ranks in (1, 2))
    figures.append(f"{precision}: {expected.step_s:.3f} s a step on one GPU, {actual.step_s:.3f} s on two")
    assert actual.metrics.keys() == expected.metrics.keys()
    for key in ("train/loss", "train/grad_norm", "train/entropy", "train/trained_tokens"):
        assert actual.metrics[key] == pytest.approx(expected.metrics[key], rel=limit, abs=limit / 10), key
    assert actual.logprobs.keys() == expected.logprobs.keys()
    far = max(float(np.abs(actual.logprobs[key] - row).mean()) for key, row in expected.logprobs.items())
    assert far < limit
