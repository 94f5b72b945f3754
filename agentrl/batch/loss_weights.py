"""Loss weights of tokens, computed over the whole batch before packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.microbatch import span_mask
from agentrl.batch.sequences import sequence_key
from agentrl.core.types import MaskReason, Row

Aggregation = Literal["token_mean", "sequence_mean", "rollout_mean", "constant"]
"""How tokens share the loss; see `row_weights`."""


def row_weights(
    rows: Sequence[Row],
    aggregation: Aggregation,
    context_weight: float = 0.0,
    constant_tokens: int = 1,
    units: int | None = None,
) -> list[NDArray[np.float32]]:
    """Return the weights of each row's tokens, ``[T]`` per row; 0 for tokens that are not trained on.

    ``token_mean``: all masked tokens of the batch have equal weights with sum 1 (DAPO, arXiv:2503.14476).
    ``sequence_mean``: all sequences have equal weights with sum 1; a sequence is all that one agent sampled in a rollout.
    ``rollout_mean``: all rollouts have equal weights with sum 1.
    ``constant``: a token weighs 1 over the number of rollouts times ``constant_tokens`` (Dr.GRPO, arXiv:2503.20783).

    The masked tokens of *all* rows of a sequence or rollout share its weight equally, so that splitting a trajectory into
    more rows changes nothing. Those without a masked token do not count.

    With ``context_weight`` the unmasked observed tokens also have equal weights, with sum ``context_weight``, except those
    that stand for images. The first
    token of a row has weight 0: no token precedes it to predict it from.

    ``units`` takes the place of `count_units` of the rows: with 1 the weights are those before they are divided by it.
    """
    masks = _masks(rows)
    token_weights = _token_weights(rows, masks, aggregation, constant_tokens, units)
    weights = [
        (mask * token_weight).astype(np.float32) for mask, token_weight in zip(masks, token_weights, strict=True)
    ]
    if context_weight:
        contexts = [
            (row.mask_reason == MaskReason.OBSERVED)
            & (np.arange(len(row.mask)) > 0)
            & ~span_mask(len(row.mask), row.images)
            for row in rows
        ]
        total = max(1, sum(int(context.sum()) for context in contexts))
        for weight, context in zip(weights, contexts, strict=True):
            weight[context] = context_weight / total
    return weights


def count_units(rows: Sequence[Row], aggregation: Aggregation) -> int:
    """Return how many masked tokens, sequences or rollouts the rows have: what share the loss; at least 1."""
    return _units(_sizes(rows, _masks(rows), aggregation), aggregation)


def _units(sizes: Mapping[object, int], aggregation: Aggregation) -> int:
    return max(1, sum(sizes.values()) if aggregation == "token_mean" else len(sizes))


def _masks(rows: Sequence[Row]) -> list[NDArray[np.bool_]]:
    """Return the loss masks without first tokens."""
    masks = [row.mask.astype(bool) for row in rows]
    for mask in masks:
        mask[:1] = False
    return masks


def _unit(row: Row, aggregation: Aggregation) -> object:
    return sequence_key(row.key) if aggregation == "sequence_mean" else row.key.rollout_id


def _sizes(rows: Sequence[Row], masks: Sequence[NDArray[np.bool_]], aggregation: Aggregation) -> dict[object, int]:
    """Return the masked tokens of each sequence or rollout that has some."""
    sizes: dict[object, int] = {}
    for row, mask in zip(rows, masks, strict=True):
        if count := int(mask.sum()):
            unit = _unit(row, aggregation)
            sizes[unit] = sizes.get(unit, 0) + count
    return sizes


def _token_weights(
    rows: Sequence[Row],
    masks: Sequence[NDArray[np.bool_]],
    aggregation: Aggregation,
    constant_tokens: int,
    units: int | None,
) -> list[float]:
    """Return the weight of one masked token of each row."""
    sizes = _sizes(rows, masks, aggregation)
    units = _units(sizes, aggregation) if units is None else units
    if aggregation == "token_mean":
        return [1 / units] * len(rows)
    if aggregation == "constant":
        return [1 / (units * constant_tokens)] * len(rows)
    row_sizes = (sizes.get(_unit(row, aggregation)) for row in rows)
    return [1 / (units * size) if size else 0.0 for size in row_sizes]
