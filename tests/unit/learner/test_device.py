"""The device of a rank: the precision of its matrix products, and the kernels that a CPU keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from agentrl.config.learner import LearnerConfig
from agentrl.learner.device import memory_to_share, use_expandable_segments, uses_bfloat16


@pytest.mark.parametrize("has", [True, False])
def test_auto_is_bfloat16_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch, *, has: bool) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    assert uses_bfloat16(LearnerConfig(device="cpu", precision="auto")) is has
    assert uses_bfloat16(LearnerConfig(device="cpu", precision="bfloat16"))
    assert not uses_bfloat16(LearnerConfig(device="cpu", precision="float32"))


@pytest.mark.parametrize("configured", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_other_processes_open_is_in_no_segment_that_grows(
    monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    """Nor does a user's own configuration change."""
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    if configured is not None:
        monkeypatch.setenv(configured, "backend:native")
    use_expandable_segments(enabled=True)
    with pytest.raises(MemoryError), memory_to_share(torch.device("cuda")):
        raise MemoryError
    with memory_to_share(torch.device("cpu")):
        pass
    pinned = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    expected = [f"expandable_segments:{enabled},{pinned}" for enabled in (True, False, True)]
    assert settings == (expected if configured is None else [])


NEW_SHAPES = """
import psutil, torch
from agentrl.config.learner import LearnerConfig
from agentrl.learner.device import pick_device

pick_device(LearnerConfig(device="cpu", threads=1), local_rank=0)
layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
layer(torch.randn(1, 64, dtype=torch.bfloat16))
before = psutil.Process().memory_info().rss
for length in range(100, 700):
    layer(torch.randn(length, 64, dtype=torch.bfloat16))
print((psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels")
def test_kernels_of_earlier_shapes_are_freed_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, "-c", NEW_SHAPES], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 200  # MiB; all 600 kernels take 390
