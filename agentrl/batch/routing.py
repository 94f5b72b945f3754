"""Experts of the tokens of micro-batches, for routing replay. Legend: ``L`` tokens of a micro-batch, ``K`` experts of a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.batch.microbatch import MicroBatch
from agentrl.core.experts import Experts, unknown_expert_mask, unknown_experts


def packed_experts(rows: Sequence[Experts | None], slices: Sequence[slice], length: int) -> torch.Tensor | None:
    """Return the experts ``[L, layers, K]`` of packed rows, also where they are not known.

    Args:
        rows: experts of each row, or None.
        slices: where each row is in the micro-batch.
        length: tokens of the micro-batch.

    Returns:
        None if no row has any.
    """
    like = next((experts for experts in rows if experts is not None), None)
    if like is None:
        return None
    packed = unknown_experts(length, like)
    for tokens, experts in zip(slices, rows, strict=True):
        if experts is not None:
            packed[tokens] = experts
    return torch.from_numpy(packed)


def routing_metrics(micro: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the share of tokens whose experts are known, and their bytes; nothing for batches without."""
    with_experts = [(batch.row_L, batch.experts_L) for batch in micro if batch.experts_L is not None]
    if not with_experts:
        return {}
    tokens = sum(int((batch.row_L >= 0).sum()) for batch in micro)
    tokens_with_experts = sum(int((~unknown_expert_mask(experts.numpy())).sum()) for _, experts in with_experts)
    size = sum(experts.nbytes for _, experts in with_experts)
    return {"batch/replayed_share": tokens_with_experts / max(1, tokens), "batch/routing_mib": size / 2**20}
