"""The device of a rank, and its process group's backends."""

from __future__ import annotations

import os

import torch

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError
from agentrl.distributed.broadcast_group import nccl_as_in_sglang


def pick_device(config: LearnerConfig, *, local_rank: int) -> torch.device:
    """Return this rank's device and set its CPU threads.

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
        if uses_bfloat16(config):
            # The head multiplies bfloat16 values in float32: TensorFloat-32 represents the factors exactly.
            torch.set_float32_matmul_precision("high")
        return torch.device("cuda", local_rank)
    torch.set_num_threads(config.threads or max(1, _cores() // config.ranks))
    return torch.device("cpu")


def uses_bfloat16(config: LearnerConfig) -> bool:
    """Return whether matrix products are computed in bfloat16: as configured, or for ``auto`` if the device can."""
    if config.autocast != "auto":
        return config.autocast == "bfloat16"
    if resolve_device(config) == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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


def _cores() -> int:
    """Return the number of cores that this process may use, or of all cores on systems without affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
