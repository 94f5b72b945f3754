"""Megatron-Core learners on two GPUs compute what one FSDP rank does on one. No engine takes part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RowLogprobs
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.registry import make_backend
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch
from tests.unit.learner.megatron.models import PP, SP, TP, make_model

pytestmark = pytest.mark.gpu

LENGTHS = (30, 50, 20, 7, 41, 64)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2": (2, TP),
    "TP2, SP": (2, TP | SP),
    "PP2": (2, PP),
    "DP2": (2, {}),
}
Found = tuple[dict[str, float], RowLogprobs]


def compute(rank: int, folder: str, ranks: int) -> None:
    """Write what each layout of ``ranks`` ranks finds, and with one rank FSDP too."""
    store = dist.FileStore(f"{folder}/store{ranks}", ranks)
    fsdp = {"fsdp": (1, None)} if ranks == 1 else {}
    layouts = {name: one for name, one in LAYOUTS.items() if one[0] == ranks}
    found = {}
    for number, (name, (_, options)) in enumerate({**fsdp, **layouts}.items()):
        given: dict[str, Any] = {"backend": "fsdp"} if options is None else {"backend": "megatron", "megatron": options}
        optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=1e9)
        config = LearnerConfig(device="cuda", ranks=ranks, precision="float32", optimizer=optimizer, **given)
        device = pick_device(config, local_rank=rank)
        if number == 0:
            dist.init_process_group(collectives("cuda"), store=store, rank=rank, world_size=ranks)
        backend = make_backend(config)
        learner = backend.rank_class()(
            Path(folder, "model"), config, make_algo(entropy_coef=0.1), device=device, seed=0
        )
        batch = make_batch(LENGTHS, micro=64, shares=backend.shares)
        mine = replace(batch, micro=(batch.micro[learner.share],), metrics={})
        found[name] = gathered(learner.train_step(mine), learner.logprobs(mine))
        if options is not None:
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
    if rank == 0:
        torch.save(found, Path(folder, f"found{ranks}.pt"))
    dist.destroy_process_group()


def gathered(metrics: dict[str, float], logprobs: RowLogprobs) -> Found:
    """The log-probabilities of all ranks."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, logprobs)
    return metrics, {key: row for each in everywhere for key, row in each.items()}


@pytest.fixture(scope="module")
def of_layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("layouts")
    make_model(folder / "model", "qwen3")
    found: dict[str, Found] = {}
    for ranks in (1, 2):
        if torch.cuda.device_count() >= ranks:
            mp.spawn(compute, (str(folder), ranks), nprocs=ranks)  # type: ignore[no-untyped-call]
            found |= torch.load(folder / f"found{ranks}.pt", weights_only=False)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_fsdp_rank_does(of_layouts, layout):
    """Before and after an optimizer step, in float32."""
    if layout not in of_layouts:
        pytest.skip("two GPUs are wanted")
    (wanted, rows), (metrics, found) = of_layouts["fsdp"], of_layouts[layout]
    for key in ("train/loss", "train/grad_norm", "train/entropy", "train/trained_tokens"):
        assert metrics[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert found.keys() == rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(found[key], row, atol=1e-3)
