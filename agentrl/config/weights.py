"""The ``weights`` section: how new weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from agentrl.config.base import Section


class WeightsConfig(Section):
    """How new weights reach the engine."""

    transport: Literal["tensor", "disk", "distributed", "ipc"] = "tensor"
    """``tensor`` sends them in the request; ``disk`` through a folder that both can read; ``distributed`` from the learner's
    rank 0 through a ``torch.distributed`` group with the engines, NCCL on GPUs of their own or gloo on a CPU; ``ipc`` lets
    engines read them from the GPU that they share with the learner (``placement.mode=colocate``)."""
    bucket_mib: PositiveInt = 512
    """Size of one bucket, MiB: what each of the learner's ranks holds beside its own weights meanwhile."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """What weights are cast to before they are sent, such as to what the engines hold; by default they go as the learner
    holds them."""
    sync_every: PositiveInt = 1
    """Steps between two updates of the engines; an evaluation always has the newest weights. Tokens carry the version that
    sampled them, and the ratio to its log-probabilities (``algo.old_logprobs=sampler``) corrects for its age."""
    check: Literal["none", "version", "checksum"] = "version"
    """What every engine is asked after an update: nothing, the version that it samples with, or checksums of its weights
    too (of engines of one rank; the driver reads all weights for it)."""
