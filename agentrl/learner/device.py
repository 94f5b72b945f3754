"""The device of a rank, and its process group's backends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.config.learner import LearnerConfig, Recompute
from agentrl.core.errors import ConfigError
from agentrl.core.kernel_cache import share_kernels
from agentrl.distributed.broadcast_group import nccl_as_in_sglang

_CPU_KERNELS = 128
"""Kernels that oneDNN, and torch's own cache before it, keep on a CPU. Each is for one shape, packed rows have a new one in
almost every group, and one of bfloat16 takes up to 1.7 MiB: with the usual 1024 a learner of 0.5M parameters grew to 4.5 GiB."""
_PINNED_MEMORY = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Settings of torch's allocator, with which threads touch the pages of pinned memory: 41 GB took 11.8 s, and 26.3 s without."""


def pick_device(config: LearnerConfig, *, local_rank: int) -> torch.device:
    """Return this rank's device; on a CPU, set its threads and how many kernels are kept.

    Args:
        config: ``device`` and ``threads`` are read.
        local_rank: index of the GPU among those visible to this process.

    Raises:
        ConfigError: ``learner.device=cuda`` without a GPU.
    """
    kind = resolve_device(config)
    if kind == "cuda":
        nccl_as_in_sglang()
        torch.cuda.set_device(local_rank)
        # cuDNN plans attention for every new shape, and packed rows have a new one in almost every group.
        torch.backends.cuda.enable_cudnn_sdp(False)
        use_expandable_segments(enabled=True)
        share_kernels()
        return torch.device("cuda", local_rank)
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(cache, str(_CPU_KERNELS))
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // config.ranks))
    return torch.device("cpu")


def use_expandable_segments(*, enabled: bool) -> None:
    """Have torch take GPU memory in segments that grow, or not, unless the user has configured its allocator.

    Micro-batches have different sizes. What a freed block of one leaves is too small for the next: with segments that grow, about
    8 GiB more of an 80 GB GPU can be used. Pinned memory is as ``_PINNED_MEMORY`` says.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{enabled},{_PINNED_MEMORY}")


@contextmanager
def memory_to_share(device: torch.device) -> Iterator[None]:
    """Return a context manager in which memory is allocated that other processes can open: not in segments that grow."""
    if device.type != "cuda":
        yield
        return
    use_expandable_segments(enabled=False)
    try:
        yield
    finally:
        use_expandable_segments(enabled=True)


def uses_bfloat16(config: LearnerConfig) -> bool:
    """Return whether matrix products are computed in bfloat16: as configured, or for ``auto`` if the device can."""
    if config.precision != "auto":
        return config.precision == "bfloat16"
    if resolve_device(config) == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compiles(config: LearnerConfig) -> bool:
    """Return whether decoder layers are compiled: as configured, or for ``auto`` on GPUs."""
    return resolve_device(config) == "cuda" if config.compile == "auto" else config.compile


def recompute_mode(config: LearnerConfig) -> Recompute:
    """Return which activations are recomputed: as configured, or for ``auto`` all but products on GPUs."""
    if config.recompute != "auto":
        return config.recompute
    return "selective" if resolve_device(config) == "cuda" else "none"


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return, as a metric, the most GPU memory that was allocated since the last call; for a CPU nothing."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"train/peak_gpu_gib": peak / 2**30}


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that this process sees; None without one."""
    count = torch.cuda.device_count()
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=None)


def collectives(device: str) -> str:
    """Return the backends of the ranks' process group. GPU ranks also need gloo, for weights offloaded to the CPU."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def resolve_device(config: LearnerConfig) -> str:
    """Return ``cpu`` or ``cuda`` for ``learner.device``.

    Raises:
        ConfigError: ``learner.device=cuda`` without a GPU.
    """
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device=cuda, but torch finds no GPU; set learner.device=cpu")
    return config.device
