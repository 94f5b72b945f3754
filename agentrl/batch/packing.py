"""Packs rows of any length into tensors, with final loss weights. Legend: ``R`` bins, ``L`` tokens a bin.

Bins are filled by first-fit-decreasing. Bins of similar length form micro-batches, so that there is little padding; every
rank gets the same number of micro-batches. Weights are shares of the *global* batch, so neither the packing nor the number
of ranks changes the gradient.

Layout of one bin with rows ``a``, ``b`` and padding ``.``::

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
from agentrl.batch.provenance import check_temperature, leave_out
from agentrl.batch.sequences import SequenceKey, sequence_key
from agentrl.core.types import Row, RowKey

MULTIPLE = 8
"""Lengths of bins are multiples of this."""

_Bin = list[int]  # indices of rows


def pack(
    rows: Sequence[Row],
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float] | None = None,
    *,
    ranks: int,
    tokens_per_bin: int,
    tokens_per_micro: int,
    pad_id: int,
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
) -> GlobalBatch:
    """Return the batch of one optimizer step. Rows without a token to train on are left out.

    Args:
        rows: of all rollouts of the step; their order does not matter.
        advantages: of every row by its key (one number, or ``[T]`` numbers), or of every rollout by ``rollout_id``.
            None is zeros, for supervised batches.
        ranks: data-parallel ranks.
        tokens_per_bin: bins are filled up to this; a longer row gets a longer bin.
        tokens_per_micro: maximum padded tokens of a micro-batch, which has at least one bin.
        pad_id: fills bins.
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

    Raises:
        KeyError: a row to train on has no advantage.
        ProvenanceError: a row of a batch that is not supervised was sampled at another temperature.
        ValueError: ``context_weight`` outside a supervised batch, or a limit below 1.
    """
    if context_weight and kind != "sft":
        raise ValueError(f"context_weight={context_weight:g} trains on observed tokens; only kind='sft' may")
    if min(ranks, tokens_per_bin, tokens_per_micro) < 1:
        raise ValueError(f"{ranks=}, {tokens_per_bin=} and {tokens_per_micro=} must be at least 1")
    weights = row_weights(rows, aggregation, context_weight, constant_tokens)
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
    bins = _first_fit([len(rows[i].token_ids) for i in chosen], tokens_per_bin)
    groups = _micro_batches([[chosen[i] for i in group] for group in bins], rows, ranks, tokens_per_micro)
    micro = [_tensors(group, rows, weights, advantages, pad_id) for group in groups]
    for batch in micro:
        batch.learner_logprobs_R_L = _values(batch, learner_logprobs)
        batch.correction_R_L = _values(batch, correction)
        batch.values_R_L, batch.returns_R_L = _values(batch, values), _values(batch, returns)
    sizes = _number_sequences(micro)
    parts = Counter(number for batch in micro for number in {*batch.sequences})
    shares = tuple(tuple(micro[rank::ranks]) for rank in range(ranks))
    metrics = _metrics(rows, chosen, micro) | ({"train/provenance_faults": float(left_out)} if kind == "rl" else {})
    divided = any(count > 1 for count in parts.values())
    return GlobalBatch(shares, kind, temperature, lr_scale, sizes, divided, metrics)


def _first_fit(lengths: Sequence[int], size: int) -> list[_Bin]:
    """Put lengths, longest first, each into the first bin with enough space."""
    bins: list[_Bin] = []
    space = np.zeros(len(lengths), np.int64)
    for index, length in enumerate(lengths):
        fits = space[: len(bins)] >= length
        first = int(fits.argmax()) if len(bins) else 0
        if not bins or not fits[first]:
            first = len(bins)
            bins.append([])
            space[first] = max(size, length)
        bins[first].append(index)
        space[first] -= length
    return bins


def _padded(group: Sequence[int], rows: Sequence[Row]) -> int:
    used = sum(len(rows[i].token_ids) for i in group)
    return -(-used // MULTIPLE) * MULTIPLE


def _micro_batches(bins: list[_Bin], rows: Sequence[Row], ranks: int, tokens: int) -> list[list[_Bin]]:
    """Divide bins, longest first, into a multiple of ``ranks`` groups of at most ``tokens`` padded tokens, or one bin.

    Adjacent groups have similar sizes, and rank ``r`` gets every ``ranks``-th, so that ranks wait little for each other.
    Groups may be empty.
    """
    bins = sorted(bins, key=lambda group: -_padded(group, rows))
    lengths = [_padded(group, rows) for group in bins]
    count = max(1, len(_cut(lengths, tokens)))
    count = -(-count // ranks) * ranks
    # Spread the bins evenly over `count` groups, instead of leaving the last groups empty.
    low, high = 1, tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(lengths, middle)) <= count else (middle + 1, high)
    cuts = _cut(lengths, low)
    return [[bins[i] for i in group] for group in cuts] + [[] for _ in range(count - len(cuts))]


def _cut(lengths: Sequence[int], tokens: int) -> list[range]:
    """Divide lengths, longest first, into runs of at most ``tokens`` when padded to the longest of the run."""
    runs: list[range] = []
    start = 0
    while start < len(lengths):
        stop = min(len(lengths), start + max(1, tokens // lengths[start]))
        runs.append(range(start, stop))
        start = stop
    return runs


def _tensors(
    group: Sequence[_Bin],
    rows: Sequence[Row],
    weights: Sequence[NDArray[np.float32]],
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float] | None,
    pad_id: int,
) -> MicroBatch:
    """Return the tensors of one group of bins; an empty group becomes one bin of padding."""
    shape = (max(1, len(group)), max([MULTIPLE, *(_padded(bin_, rows) for bin_ in group)]))
    token_ids, positions = np.full(shape, pad_id, np.int64), np.zeros(shape, np.int64)
    row, versions, requests = (np.full(shape, -1, np.int32) for _ in range(3))
    provenance = np.zeros(shape, np.uint8)
    weight, advantage, logprobs = (np.zeros(shape, np.float32) for _ in range(3))
    keys: list[RowKey] = []
    for number, bin_ in enumerate(group or [[]]):
        start = 0
        for index in bin_:
            source = rows[index]
            here = (number, slice(start, start + len(source.token_ids)))
            start += len(source.token_ids)
            token_ids[here] = source.token_ids
            positions[here] = np.arange(len(source.token_ids))
            row[here] = len(keys)
            provenance[here] = source.provenance
            versions[here] = source.versions
            requests[here] = source.requests
            logprobs[here] = source.logprobs
            weight[here] = weights[index]
            if advantages is not None:
                advantage[here] = _advantage(advantages, source.key)
            keys.append(source.key)
        positions[number, start:] = np.arange(shape[1] - start)
    mask = weight > 0
    return MicroBatch(
        token_ids_R_L=torch.from_numpy(token_ids),
        position_ids_R_L=torch.from_numpy(positions),
        row_R_L=torch.from_numpy(row),
        mask_R_L=torch.from_numpy(mask),
        weight_R_L=torch.from_numpy(weight),
        advantages_R_L=torch.from_numpy(advantage * mask),
        logprobs_R_L=torch.from_numpy(logprobs),
        provenance_R_L=torch.from_numpy(provenance),
        versions_R_L=torch.from_numpy(versions),
        requests_R_L=torch.from_numpy(requests),
        keys=tuple(keys),
    )


def _values(batch: MicroBatch, values: Mapping[RowKey, NDArray[np.float32]] | None) -> torch.Tensor | None:
    """Return ``[R, L]`` float32 values of the packed rows, 0 in padding."""
    if values is None:
        return None
    found_R_L = torch.zeros(batch.row_R_L.shape)
    for number, key in enumerate(batch.keys):
        found_R_L[batch.row_R_L == number] = torch.from_numpy(np.asarray(values[key], np.float32))
    return found_R_L


def _number_sequences(micro: Sequence[MicroBatch]) -> tuple[int, ...]:
    """Number the sequences of all rows, and return how many trained tokens each has."""
    numbers: dict[SequenceKey, int] = {}
    sizes: Counter[int] = Counter()
    for batch in micro:
        batch.sequences = tuple(numbers.setdefault(sequence_key(key), len(numbers)) for key in batch.keys)
        for row, number in enumerate(batch.sequences):
            sizes[number] += int((batch.mask_R_L & (batch.row_R_L == row)).sum())
    return tuple(sizes[number] for number in range(len(numbers)))


def _advantage(
    advantages: Mapping[RowKey, float | NDArray[np.float32]] | Mapping[str, float], key: RowKey
) -> float | NDArray[np.float32]:
    found: Mapping[RowKey | str, float | NDArray[np.float32]] = advantages  # type: ignore[assignment]
    return found[key] if key in found else found[key.rollout_id]


def _metrics(rows: Sequence[Row], chosen: Sequence[int], micro: Sequence[MicroBatch]) -> dict[str, float]:
    tokens = sum(len(rows[i].token_ids) for i in chosen)
    padded = sum(batch.token_ids_R_L.numel() for batch in micro)
    return {
        "batch/rows": float(len(chosen)),
        "batch/tokens": float(tokens),
        "batch/trained_tokens": float(sum(int(batch.mask_R_L.sum()) for batch in micro)),
        "batch/padding_share": 1 - tokens / padded,
        "batch/micro_batches": float(len(micro)),
    }
