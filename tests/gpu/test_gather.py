"""Weights that two learner ranks hold in shards on two GPUs, gathered through NCCL. No engine takes part."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from agentrl.distributed.base import tensor_spec
from agentrl.distributed.flat_bucket import order_by_alignment, total_bytes, views
from agentrl.learner.fsdp.gather import gather_weights

pytestmark = pytest.mark.gpu

RANKS = 2
SHAPES = [(1, 4), (3,), (151, 64), *[(4096, 4096), (4096,), (1024, 4096), (12288, 4096)] * 8]
"""Those of eight layers, about 1.1 GB in bfloat16, and some that the ranks cannot divide evenly."""


def gather(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cuda", (RANKS,))
    torch.manual_seed(0)
    full_tensors = {f"w{number}": torch.randn(shape, device="cuda") for number, shape in enumerate(SHAPES)}
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full_tensors.items()}
    specs = order_by_alignment([tensor_spec(name, tensor.bfloat16()) for name, tensor in full_tensors.items()])
    flat = torch.zeros(total_bytes(*specs), dtype=torch.uint8, device="cuda")
    into = views(specs, flat)
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        gather_weights((sharded[name], out) for name, out in into)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    assert all(torch.equal(out, full_tensors[name].bfloat16()) for name, out in into)
    if rank == 0:
        Path(folder, "figure").write_text(f"gather of {len(flat) / 1e9:.2f} GB: {1000 * seconds:.1f} ms")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="two GPUs are wanted")
def test_two_ranks_gather_what_they_hold_in_shards(tmp_path: Path, figures: list[str]) -> None:
    mp.spawn(gather, (str(tmp_path),), nprocs=RANKS)  # type: ignore[no-untyped-call]
    figures.append((tmp_path / "figure").read_text())
