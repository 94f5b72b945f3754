"""A learner's memory on a GPU: another process opens its weights there, and it gives the memory back and takes it again.

No engine takes part.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import LearnerError
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch, make_model, tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

OPENER = """
import base64, hashlib, json, pickle, sys
import torch
from torch.multiprocessing import reductions

original = reductions.rebuild_cuda_tensor

def rebuild(*args):
    found = [n for n in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(n).uuid) == args[6]]
    return original(*args[:6], found[0], *args[7:])

def tensor_checksum(tensor):
    return hashlib.sha256(tensor.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()

reductions.rebuild_cuda_tensor = rebuild
for line in sys.stdin:
    bucket = pickle.loads(base64.b64decode(line))
    flat = bucket["flattened_tensor"]
    sums = {
        one.name: tensor_checksum(flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape))
        for one in bucket["metadata"]
    }
    print(json.dumps(sums), flush=True)
    del bucket, flat
"""
"""Does with a bucket's handle what SGLang does."""


@pytest.fixture
def opened() -> Iterator[Callable[[str], dict[str, str]]]:
    """Another process opens handles and says what it finds."""
    with subprocess.Popen(
        [sys.executable, "-c", OPENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        read, write = process.stdout, process.stdin

        def ask(handles: str) -> dict[str, str]:
            write.write(handles + "\n")
            write.flush()
            record: dict[str, str] = json.loads(read.readline())
            return record

        yield ask
        write.close()


def tensor_checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def test_another_process_opens_weights_where_they_are(opened):
    weights = {f"w{n}": torch.randn(n + 1, 1000, device="cuda") for n in range(20)} | {
        "one": torch.ones((), device="cuda")
    }
    learner = WeightExporter(NamedTensors(weights))
    state_before = torch.cuda.memory_allocated()
    for turn in range(3):
        buckets = 0
        for bucket in learner.buckets(100_000, "bfloat16" if turn else None):
            [handles] = bucket.ipc_handles()
            assert opened(handles) == {name: tensor_checksum(tensor) for name, tensor in bucket.tensors()}
            buckets += 1
        assert buckets > 3
        del bucket
        assert torch.cuda.memory_allocated() - state_before <= 100_352, "one bucket, used again and again"
        for value in weights.values():
            value.add_(1)


def test_a_learner_gives_its_gpu_back_and_takes_it_again(tmp_path):
    model = make_model(tmp_path / "model", hidden_size=1024, intermediate_size=4096)
    learner = LocalLearnerGroup(model, LearnerConfig(device="cuda"), make_algo(kl_coef=0.1), seed=0, reference=model)
    try:
        learner.train_step(make_batch([30, 50, 20]))
        learner.save(tmp_path / "awake")
        weights, taken = tensors(learner), torch.cuda.memory_allocated()
        with torch.no_grad():
            allocated = sum(tensor.untyped_storage().nbytes() for tensor in learner.rank._state())
        assert allocated > 300 << 20
        for _ in range(2):
            learner.sleep()
            assert taken - torch.cuda.memory_allocated() >= allocated
            assert all(torch.equal(value, weights[name]) for name, value in tensors(learner).items())
            [bucket] = learner.buckets(1 << 30)
            with pytest.raises(LearnerError, match="not on a GPU"):
                bucket.ipc_handles()
            learner.save(tmp_path / "asleep")
            learner.wake()
            assert taken - torch.cuda.memory_allocated() < allocated / 10
            assert all(torch.equal(value, weights[name]) for name, value in tensors(learner).items())
        next_batch = make_batch([40, 25, 33], seed=3)
        straight = learner.train_step(next_batch)
        for state in ("asleep", "awake"):
            learner.load(tmp_path / state)
            figures = learner.train_step(next_batch)
            # Some of CUDA's sums have no fixed order.
            assert figures["train/grad_norm"] == pytest.approx(straight["train/grad_norm"], rel=1e-2)
    finally:
        learner.close()


def memory_without_workspaces() -> int:
    """Return the allocated bytes of the GPU, without what cuBLAS took with its first product and keeps."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_offloaded_optimizer_states_have_no_gpu_memory(tmp_path):
    model = make_model(tmp_path / "model", hidden_size=1024, intermediate_size=4096)
    actual = {}
    for where in ("none", "optimizer"):
        config = LearnerConfig(device="cuda", cpu_offload=where)
        memory_before = memory_without_workspaces()
        learner = LocalLearnerGroup(model, config, make_algo(), seed=0)
        try:
            learner.rank.optimizer_states._chunk_bytes = 64 << 20
            torch.cuda.reset_peak_memory_stats()
            metrics = [learner.train_step(make_batch([30, 50, 20], seed=seed)) for seed in range(3)]
            weights = sum(parameter.nbytes for parameter in learner.rank.model.parameters())
            peak = torch.cuda.max_memory_allocated() - memory_before
            actual[where] = metrics, memory_without_workspaces() - memory_before, peak
            learner.save(tmp_path / where)
            again = learner.train_step(make_batch([40, 25, 33], seed=3))
            learner.load(tmp_path / where)
            repeated = learner.train_step(make_batch([40, 25, 33], seed=3))
            assert repeated["train/grad_norm"] == pytest.approx(again["train/grad_norm"], rel=1e-2)
        finally:
            learner.close()
        del learner
        torch.cuda.empty_cache()
    (plain, plain_held, plain_peak), (offloaded, offloaded_held, peak) = actual["none"], actual["optimizer"]
    assert plain_held - offloaded_held == pytest.approx(2 * weights, rel=0.05)
    assert plain_peak - peak > weights
    for first, second in zip(plain, offloaded, strict=True):
        # Some of CUDA's sums have no fixed order.
        assert second["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-2)
    print(
        f"GPU memory after three steps: {plain_held >> 20} MiB, with cpu_offload {offloaded_held >> 20}; weights {weights >> 20}"
    )
