"""How much each token counts in the loss. Fixed before packing, over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import MaskReason, Row

Aggregation = Literal["token_mean", "rollout_mean"]
"""How tokens share the loss, see `row_weights`."""


def row_weights(
    rows: Sequence[Row], aggregation: Aggregation, context_weight: float = 0.0
) -> list[NDArray[np.float32]]:
    """Return the weight of every token of every row, ``[T]`` each, 0 where it is not trained on.

    ``token_mean``: all masked tokens of the batch weigh the same, 1 in sum (DAPO, arXiv:2503.14476). ``rollout_mean``:
    every rollout weighs the same, 1 in sum, and its masked tokens share that over *all* its rows, so that cutting a
    trajectory into more rows changes nothing. Rollouts without a masked token do not count.

    With ``context_weight`` the unmasked observed tokens weigh beside that, equally, ``context_weight`` in sum. A row's
    first token weighs 0: nothing comes before it to predict it from.
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
    """Return what one masked token of each row weighs."""
    counts = [int(mask.sum()) for mask in masks]
    if aggregation == "token_mean":
        return [1 / max(1, sum(counts))] * len(rows)
    by_rollout: dict[str, int] = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            by_rollout[row.key.rollout_id] = by_rollout.get(row.key.rollout_id, 0) + count
    return [1 / (len(by_rollout) * by_rollout[row.key.rollout_id]) if count else 0.0
            for row, count in zip(rows, counts, strict=True)]  # fmt: skip
