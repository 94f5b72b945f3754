"""Packs rows of any length into tensors, with final loss weights. Legend: ``L`` tokens of a micro-batch.

A micro-batch is one sequence of packed rows. Every share of a batch has the same number of micro-batches, of about the same
cost. Weights are parts of the *global* batch, so neither the packing nor the number of shares changes the gradient.

Layout of a micro-batch with rows ``a``, ``b`` and padding ``.``::

    token     a0 a1 a2 b0 b1 .  .  .
    position   0  1  2  0  1 0  1  2
    row        0  0  0  1  1 -1 -1 -1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.loss_weights import Aggregation, row_weights
from agentrl.batch.microbatch import GlobalBatch, Kind, MicroBatch
from agentrl.batch.prefix_groups import divide
from agentrl.batch.provenance import check_temperature, leave_out
from agentrl.batch.routing import packed_experts, routing_metrics
from agentrl.batch.sequences import SequenceKey, sequence_key
from agentrl.core.task import source_of
from agentrl.core.types import Row, RowKey

MULTIPLE = 32
"""Lengths of micro-batches are multiples of this."""


def pack(
    rows: Sequence[Row],
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float] | None = None,
    *,
    shares: int,
    tokens_per_micro: int,
    pad_id: int,
    share_prefixes: bool = False,
    aggregation: Aggregation = "token_mean",
    kind: Kind = "rl",
    temperature: float = 1.0,
    context_weight: float = 0.0,
    lr_scale: float = 1.0,
    provenance: Literal["strict", "warn"] = "strict",
    constant_tokens: int = 1,
    trained: Collection[str] | None = None,
    learner_logprobs: Mapping[RowKey, NDArray[np.float32]] | None = None,
    correction: Mapping[RowKey, NDArray[np.float32]] | None = None,
    values: Mapping[RowKey, NDArray[np.float32]] | None = None,
    returns: Mapping[RowKey, NDArray[np.float32]] | None = None,
    sources: Sequence[str] = (),
    policy: str = "main",
    units: int | None = None,
    completes: bool = True,
    gradient_scale: float = 1.0,
) -> GlobalBatch:
    """Return the batch of one optimizer step, or a part of it. Rows without a token to train on are left out.

    Args:
        rows: of all rollouts of the step; their order does not matter.
        advantages: of every row by its key (one number, or ``[T]`` numbers), or of every rollout by ``rollout_id``.
            None is zeros, for supervised batches.
        shares: of the batch, which ranks of a learner compute at the same time; see `LearnerBackend.shares`.
        tokens_per_micro: maximum tokens of a micro-batch, before padding; a longer row gets a separate one.
        pad_id: fills micro-batches.
        share_prefixes: whether the learner computes what rows of a micro-batch begin with once, where that is faster.
        aggregation: see `row_weights`.
        kind: ``sft`` may train on demonstrated and, with ``context_weight``, observed tokens.
        temperature: of sampling; the learner computes log-probabilities at the same temperature.
        context_weight: see `row_weights`.
        lr_scale: the schedule's factor for this step.
        provenance: ``warn`` leaves masked tokens of an ``rl`` batch out of the loss that no engine sampled; the others keep
            their weights. ``strict`` leaves them for `check_provenance` to refuse.
        constant_tokens: see `row_weights`.
        trained: ids of the rollouts to train on; rows of others only count in the denominators. None are all.
        learner_logprobs: ``[T]`` by row, of the learner before the first optimizer step of the training step.
        correction: ``[T]`` importance weights by row.
        values: ``[T]`` by row, of the critic before the first optimizer step of the training step.
        returns: ``[T]`` by row, which the critic learns to predict.
        sources: of a mixed run, whose rows get the numbers of theirs.
        policy: of the rows, in a run that trains several.
        units: see `row_weights`; 1 in parts of a step, whose number of units is known at its end.
        completes: see `GlobalBatch.completes`.
        gradient_scale: see `GlobalBatch.gradient_scale`.

    Raises:
        KeyError: a row to train on has no advantage.
        ProvenanceError: a row of a batch that is not supervised was sampled at another temperature.
        ValueError: ``context_weight`` outside a supervised batch, or a limit below 1.
    """
    if context_weight and kind != "sft":
        raise ValueError(f"context_weight={context_weight:g} trains on observed tokens; only kind='sft' may")
    if min(shares, tokens_per_micro) < 1:
        raise ValueError(f"{shares=} and {tokens_per_micro=} must be at least 1")
    weights = row_weights(rows, aggregation, context_weight, constant_tokens, units)
    left_out = leave_out(rows, weights) if kind != "sft" and provenance == "warn" else 0
    # Sorting by length, then key, makes the batch a function of the set of rows.
    chosen = sorted(
        (
            i
            for i, weight in enumerate(weights)
            if weight.any() and (trained is None or rows[i].key.rollout_id in trained)
        ),
        key=lambda i: (-len(rows[i].token_ids), rows[i].key),
    )
    if kind != "sft":
        check_temperature((rows[i] for i in chosen), temperature)
    groups = divide([rows[i].token_ids for i in chosen], shares, tokens_per_micro, share_prefixes=share_prefixes)
    micro = [_tensors([chosen[i] for i in group.rows], rows, weights, advantages, pad_id) for group in groups]
    for batch, group in zip(micro, groups, strict=True):
        batch.shares_prefixes = group.shares_prefixes
        batch.learner_logprobs_L = _values(batch, learner_logprobs)
        batch.correction_L = _values(batch, correction)
        batch.experts_L = packed_experts([rows[chosen[i]].experts for i in group.rows], batch.row_L)
        batch.values_L, batch.returns_L = _values(batch, values), _values(batch, returns)
        batch.sources = tuple(sources.index(source_of(key.prompt_id)) for key in batch.keys) if sources else ()
    sizes = _number_sequences(micro)
    parts = Counter(number for batch in micro for number in {*batch.sequences})
    computed = sum(group.computed_tokens for group in groups)
    metrics = (
        _metrics(rows, chosen, micro, computed)
        | routing_metrics(micro)
        | ({"train/provenance_faults": float(left_out)} if kind == "rl" else {})
    )
    divided = any(count > 1 for count in parts.values())
    by_share = tuple(tuple(micro[share::shares]) for share in range(shares))
    return GlobalBatch(
        by_share, kind, temperature, lr_scale, sizes, divided, metrics, policy, completes, gradient_scale
    )


def _tensors(
    group: Sequence[int],
    rows: Sequence[Row],
    weights: Sequence[NDArray[np.float32]],
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float] | None,
    pad_id: int,
) -> MicroBatch:
    """Return the tensors of the rows of a micro-batch; without rows it is padding only."""
    used = sum(len(rows[i].token_ids) for i in group)
    length = -(-max(used, 1) // MULTIPLE) * MULTIPLE
    token_ids, positions = np.full(length, pad_id, np.int64), np.zeros(length, np.int64)
    row, versions, requests = (np.full(length, -1, np.int32) for _ in range(3))
    provenance = np.zeros(length, np.uint8)
    weight, advantage, logprobs = (np.zeros(length, np.float32) for _ in range(3))
    start = 0
    for number, index in enumerate(group):
        source = rows[index]
        here = slice(start, start + len(source.token_ids))
        start = here.stop
        token_ids[here] = source.token_ids
        positions[here] = np.arange(len(source.token_ids))
        row[here] = number
        provenance[here] = source.provenance
        versions[here] = source.versions
        requests[here] = source.requests
        logprobs[here] = source.logprobs
        weight[here] = weights[index]
        if advantages is not None:
            advantage[here] = _advantage(advantages, source.key)
    positions[start:] = np.arange(length - start)
    mask = weight > 0
    return MicroBatch(
        token_ids_L=torch.from_numpy(token_ids),
        position_ids_L=torch.from_numpy(positions),
        row_L=torch.from_numpy(row),
        mask_L=torch.from_numpy(mask),
        weight_L=torch.from_numpy(weight),
        advantages_L=torch.from_numpy(advantage * mask),
        logprobs_L=torch.from_numpy(logprobs),
        provenance_L=torch.from_numpy(provenance),
        versions_L=torch.from_numpy(versions),
        requests_L=torch.from_numpy(requests),
        keys=tuple(rows[index].key for index in group),
    )


def _values(batch: MicroBatch, values: Mapping[RowKey, NDArray[np.float32]] | None) -> torch.Tensor | None:
    """Return ``[L]`` float32 values of the packed rows, 0 in padding."""
    if values is None:
        return None
    found_L = torch.zeros(batch.row_L.shape)
    for number, key in enumerate(batch.keys):
        found_L[batch.row_L == number] = torch.from_numpy(np.asarray(values[key], np.float32))
    return found_L


def _number_sequences(micro: Sequence[MicroBatch]) -> tuple[int, ...]:
    """Number the sequences of all rows, and return how many trained tokens each has."""
    numbers: dict[SequenceKey, int] = {}
    sizes: Counter[int] = Counter()
    for batch in micro:
        batch.sequences = tuple(numbers.setdefault(sequence_key(key), len(numbers)) for key in batch.keys)
        for row, number in enumerate(batch.sequences):
            sizes[number] += int((batch.mask_L & (batch.row_L == row)).sum())
    return tuple(sizes[number] for number in range(len(numbers)))


def _advantage(
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float], key: RowKey
) -> float | NDArray[np.float32]:
    found: Mapping[RowKey | str, float | NDArray[np.float32]] = advantages  # type: ignore[assignment]
    return found[key] if key in found else found[key.rollout_id]


def _metrics(
    rows: Sequence[Row], chosen: Sequence[int], micro: Sequence[MicroBatch], computed: int
) -> dict[str, float]:
    tokens = sum(len(rows[i].token_ids) for i in chosen)
    padded = sum(batch.token_ids_L.numel() for batch in micro)
    return {
        "batch/rows": float(len(chosen)),
        "batch/tokens": float(tokens),
        "batch/trained_tokens": float(sum(int(batch.mask_L.sum()) for batch in micro)),
        "batch/padding_share": 1 - tokens / padded,
        "batch/shared_share": 1 - computed / max(1, tokens),
        "batch/micro_batches": float(len(micro)),
    }
