"""Loss weights of tokens, computed over the whole batch before packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import MaskReason, Row

Aggregation = Literal["token_mean", "rollout_mean"]
"""How tokens share the loss; see `row_weights`."""


def row_weights(
    rows: Sequence[Row], aggregation: Aggregation, context_weight: float = 0.0
) -> list[NDArray[np.float32]]:
    """Return the weights of each row's tokens, ``[T]`` per row; 0 for tokens that are not trained on.

    ``token_mean``: all masked tokens of the batch have equal weights with sum 1 (DAPO, arXiv:2503.14476).
    ``rollout_mean``: all rollouts have equal weights with sum 1, and the masked tokens of *all* rows of a rollout share its
    weight equally, so that splitting a trajectory into more rows changes nothing. Rollouts without a masked token do not
    count.

    With ``context_weight`` the unmasked observed tokens also have equal weights, with sum ``context_weight``. The first
    token of a row has weight 0: no token precedes it to predict it from.
    """
    masks = [row.mask.astype(bool) for row in rows]
    for mask in masks:
        mask[:1] = False
    shares = _shares(rows, masks, aggregation)
    weights = [(mask * share).astype(np.float32) for mask, share in zip(masks, shares, strict=True)]
    if context_weight:
        contexts = [(row.mask_reason == MaskReason.OBSERVED) & (np.arange(len(row.mask)) > 0) for row in rows]
        total = sum(int(context.sum()) for context in contexts)
        for weight, context in zip(weights, contexts, strict=True):
            weight[context] = context_weight / total
    return weights


def _shares(rows: Sequence[Row], masks: Sequence[NDArray[np.bool_]], aggregation: Aggregation) -> list[float]:
    """Return the weight of one masked token of each row."""
    counts = [int(mask.sum()) for mask in masks]
    if aggregation == "token_mean":
        return [1 / max(1, sum(counts))] * len(rows)
    by_rollout: dict[str, int] = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            by_rollout[row.key.rollout_id] = by_rollout.get(row.key.rollout_id, 0) + count
    return [1 / (len(by_rollout) * by_rollout[row.key.rollout_id]) if count else 0.0
            for row, count in zip(rows, counts, strict=True)]  # fmt: skip
