"""The ``weights`` section: how new weights reach the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from agentrl.config.base import Section


class WeightsConfig(Section):
    """Weight sync from the learner to the engines."""

    transport: str = "tensor"
    """``tensor``: in the HTTP request; ``delta``: likewise, but only what has changed since the last sync; ``disk``: through a
    folder that both can read; ``distributed``: broadcast from the learner's rank 0 in a ``torch.distributed`` group with the
    engines, NCCL on separate GPUs or gloo on a CPU; ``ipc``: CUDA IPC on the GPUs that engines share with the learner
    (``placement.mode=colocate``). For ``delta`` the learner's rank 0 keeps a copy of the weights in the CPU's memory. Or a class
    of yours: ``FILE.py:Class``, ``module:Class`` or an entry point of ``agentrl.transports``."""
    adapters: Literal["merged", "only"] = "merged"
    """With ``learner.lora``: ``merged`` sends all weights, with the adapters merged; ``only`` sends the adapters, in the HTTP
    request, and the engines keep the base model's weights; several policies need it. Not with ``placement.mode=colocate``."""
    bucket_mib: PositiveInt | None = None
    """Size of one bucket, MiB; by default 4096 for ``ipc`` and ``distributed``, and 512 for ``tensor`` and ``disk``. A
    smaller model is one bucket. Each learner rank needs this memory on its device for a sync in addition to its weights, and
    with ``ipc`` keeps it. With ``distributed`` each GPU of an engine needs it too, with SGLang 0.5.17 twice."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Weights are cast to it before they are sent. ``auto`` is what the engines report to hold; if they report nothing, or
    hold different ones, the learner's float32 is sent."""
    sync_every: PositiveInt = 1
    """Steps between weight syncs; an evaluation always has the newest weights. Tokens have the version that sampled them,
    and the ratio to its log-probabilities (``algo.old_logprobs=sampler``) corrects for its age. With ``async.max_staleness`` at
    most that plus 1."""
    pause: Literal["finish", "restart", "abort", "retract", "in_place"] = "abort"
    """What becomes of generations in progress at a sync, with ``async.max_staleness``. ``finish``: engines end them first, with
    the old weights. ``restart``: they are sampled again from their first token. With the others they go on from the same tokens
    with the new weights: ``abort`` sends the tokens again, ``retract`` lets the engine compute their keys and values again,
    ``in_place`` keeps those of the old weights. SGLang before 0.5.23 has only the first three."""
    prefix_cache: Literal["drop", "by_version", "keep"] = "drop"
    """What becomes of the engines' prefix cache at a sync. ``drop``: it is emptied. ``by_version``: requests reuse only what
    their policy version has computed. ``keep``: requests also reuse keys and values of older weights."""
    check: Literal["none", "version", "checksum"] = "version"
    """Check of every engine after a sync: none, its policy version, or also checksums of its weights (for engines of one
    rank; the driver reads all weights for it)."""
