"""Rows to micro-batches. Legend: ``T`` tokens of a row, ``L`` tokens of a micro-batch.

Weights are parts of the *global* batch, so neither the packing nor the number of ranks changes the gradient.

Layout of a micro-batch with rows ``a``, ``b`` and padding ``.``::

    token     a0 a1 a2 b0 b1 .  .  .
    position   0  1  2  0  1 0  1  2
    row        0  0  0  1  1 -1 -1 -1
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.loss_weights import Aggregation, row_weights
from agentrl.batch.microbatch import GlobalBatch, Kind, MicroBatch, Truncation
from agentrl.batch.prefix_groups import Division, divide_rows
from agentrl.batch.prefix_tree import TokenIds, token_keys
from agentrl.batch.provenance import check_temperature, leave_out
from agentrl.batch.sequences import RowValues, SequenceKey, sequence_key
from agentrl.core.experts import Experts, unknown_expert_mask, unknown_experts
from agentrl.core.images import Image, PlacedImage
from agentrl.core.sampling_support import SamplingSupport, concatenate_supports
from agentrl.core.task import task_source_name
from agentrl.core.types import Row


def packed_experts(rows: Sequence[Experts | None], slices: Sequence[slice], length: int) -> torch.Tensor | None:
    """Return the experts ``[L, layers, K]`` of packed rows; `unknown_experts` where they are not known.

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
    """Return the share of tokens whose experts are known, and their bytes; empty if no batch has experts."""
    with_experts = [(batch.row_L, batch.experts_L) for batch in micro if batch.experts_L is not None]
    if not with_experts:
        return {}
    tokens = sum(int((batch.row_L >= 0).sum()) for batch in micro)
    tokens_with_experts = sum(int((~unknown_expert_mask(experts.numpy())).sum()) for _, experts in with_experts)
    size = sum(experts.nbytes for _, experts in with_experts)
    return {"batch/replayed_share": tokens_with_experts / max(1, tokens), "batch/routing_mib": size / 2**20}


def packed_support(rows: Sequence[Row], length: int) -> SamplingSupport:
    """Return the sampling support of packed rows, one after the other, and of padding, which has none."""
    sizes = [len(row.token_ids) for row in rows]
    padding = SamplingSupport(np.zeros(length - sum(sizes), np.int32), np.zeros(0, np.int32))
    support = concatenate_supports([*(row.support for row in rows), padding], [*sizes, len(padding)])
    assert support is not None, "padding has one"
    return support


def support_metrics(micro: Sequence[MicroBatch]) -> dict[str, float]:
    """Return the mean number of ids that trained tokens were sampled from, and their bytes; empty if no batch has a support."""
    supports = [(batch.mask_L.numpy(), batch.support) for batch in micro if batch.support is not None]
    if not supports:
        return {}
    counts = np.concatenate([support.counts[mask_L] for mask_L, support in supports])
    size = sum(
        array.nbytes
        for _, support in supports
        for array in (support.counts, support.token_ids, support.logprobs)
        if array is not None
    )
    return {"batch/support_size": float(counts.mean()) if len(counts) else 0.0, "batch/support_mib": size / 2**20}


MULTIPLE = 32
"""Lengths of micro-batches are multiples of this."""


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How rows are packed: the same for all batches of a run.

    Example: ``PackOptions(tokens_per_micro=8192, data_parallel_size=2, pad_id=151643)``.
    """

    tokens_per_micro: int
    """Maximum tokens of a micro-batch, before padding; a longer row gets a separate one."""
    data_parallel_size: int = 1
    """Parts of a batch that ranks of a learner compute at the same time; see `LearnerBackend.data_parallel_size`."""
    pad_id: int = 0
    """Token that fills micro-batches."""
    share_prefixes: bool = False
    """Whether the learner computes a prefix that rows of a micro-batch share once, if that is faster."""
    aggregation: Aggregation = "token_mean"
    """See `row_weights`."""
    constant_tokens: int = 1
    """See `row_weights`."""
    context_weight: float = 0.0
    """See `row_weights`; only supervised batches may train on observed tokens."""
    temperature: float = 1.0
    """Temperature of sampling; the learner computes log-probabilities at the same temperature."""
    truncation: Truncation | None = None
    """See `GlobalBatch.truncation`; for batches of kind ``rl`` only."""
    replays_support: bool = False
    """Whether micro-batches of kind ``rl`` have the sampling support of rows, without which no token is trained."""
    provenance: Literal["strict", "warn"] = "strict"
    """``warn`` leaves trained tokens of an ``rl`` batch that no engine sampled out of the loss; the others keep their weights.
    ``strict`` leaves them for `check_provenance` to refuse."""
    sources: tuple[str, ...] = ()
    """Names of the sources of a mixed run; each row gets the index of its source."""

    def __post_init__(self) -> None:
        """Check the limits."""
        if min(self.data_parallel_size, self.tokens_per_micro) < 1:
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} and tokens_per_micro={self.tokens_per_micro} must be at least 1"
            )


@dataclass(frozen=True, slots=True)
class RowSignals:
    """What the learner trains on besides tokens: by row ``[T]`` float32, or None if the batch has none.

    Values at tokens that are not trained are ignored.
    """

    advantages: RowValues | None = None
    """Advantages of every trained row; None is zeros, as in supervised batches and the critic's."""
    learner_logprobs: RowValues | None = None
    """Log-probabilities of the learner before the first optimizer step of the training step."""
    correction: RowValues | None = None
    """Importance weights."""
    values: RowValues | None = None
    """The critic's values before the first optimizer step of the training step."""
    returns: RowValues | None = None
    """Returns: the targets of the critic."""
    weights: RowValues | None = None
    """Factors of the loss of each token (``batch.convert``); None is ones."""
    images: Mapping[str, Image] = field(default_factory=dict)
    """Images of the rows, by digest."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """Which part of an optimizer step a batch is."""

    units: int | None = None
    """See `row_weights`; 1 in parts of an optimizer step, whose number of units is known at its end."""
    completes: bool = True
    """See `GlobalBatch.completes`."""
    gradient_scale: float = 1.0
    """See `GlobalBatch.gradient_scale`."""


WHOLE_STEP = StepPart()
NO_SIGNALS = RowSignals()


def pack(
    rows: Sequence[Row],
    options: PackOptions,
    signals: RowSignals = NO_SIGNALS,
    *,
    kind: Kind = "rl",
    policy: str = "main",
    trained: Collection[str] | None = None,
    step_part: StepPart = WHOLE_STEP,
    lr_scale: float = 1.0,
) -> GlobalBatch:
    """Return the batch of one optimizer step, or a part of it. Rows without a token to train on are left out.

    Args:
        rows: of all rollouts of the optimizer step; their order does not matter.
        options: of the run.
        signals: of the rows.
        kind: ``sft`` may train on demonstrated and, with ``context_weight``, observed tokens.
        policy: which of several policies the rows are of.
        trained: ids of the rollouts to train on; rows of others only count in the denominators. None: all.
        step_part: which part of the optimizer step the batch is.
        lr_scale: the schedule's factor for this optimizer step.

    Raises:
        KeyError: a row to train on has no advantage, or an image of a row is missing.
        ProvenanceError: a row of a batch that is not supervised was sampled at another temperature.
        ValueError: ``context_weight`` outside a supervised batch.
    """
    if options.context_weight and kind != "sft":
        raise ValueError(f"context_weight={options.context_weight:g} trains on observed tokens; only kind='sft' may")
    weights = row_weights(rows, options.aggregation, options.context_weight, options.constant_tokens, step_part.units)
    if signals.weights is not None:
        weights = [weight_T * signals.weights[row.key] for row, weight_T in zip(rows, weights, strict=True)]
    replays_support = options.replays_support and kind == "rl"
    faults = 0
    if kind != "sft" and options.provenance == "warn":
        faults = leave_out(rows, weights, needs_support=replays_support)
    # Sorting by length, then key, makes the batch a function of the set of rows.
    weighted_rows = sorted(
        (
            _WeightedRow(row, weight_T)
            for row, weight_T in zip(rows, weights, strict=True)
            if weight_T.any() and (trained is None or row.key.rollout_id in trained)
        ),
        key=lambda weighted: (-len(weighted.row.token_ids), weighted.row.key),
    )
    if kind != "sft":
        check_temperature((weighted.row for weighted in weighted_rows), options.temperature)
    divisions = divide_rows(
        _prefix_rows([weighted.row for weighted in weighted_rows]),
        options.data_parallel_size,
        options.tokens_per_micro,
        share_prefixes=options.share_prefixes,
        image_tokens=[sum(span.length for span in weighted.row.images) for weighted in weighted_rows],
    )
    sequences = _SequenceNumbers()
    micro = [
        _micro_batch(
            [weighted_rows[index] for index in division.rows],
            division,
            options,
            signals,
            sequences,
            replays_support=replays_support,
        )
        for division in divisions
    ]
    ranks = options.data_parallel_size
    for first in range(0, len(micro), ranks):  # these are computed at the same time
        if any(batch.images for batch in micro[first : first + ranks]):
            micro[first : first + ranks] = [replace(batch, needs_vision=True) for batch in micro[first : first + ranks]]
    metrics = _metrics([weighted.row for weighted in weighted_rows], micro, divisions)
    metrics |= routing_metrics(micro) | support_metrics(micro)
    if kind == "rl":
        metrics["train/provenance_faults"] = float(faults)
    return GlobalBatch(
        micro=tuple(tuple(micro[rank::ranks]) for rank in range(ranks)),
        kind=kind,
        temperature=options.temperature,
        truncation=options.truncation if kind == "rl" else None,
        lr_scale=lr_scale,
        sequence_sizes=sequences.sizes(),
        divided_sequences=sequences.are_divided(),
        metrics=metrics,
        policy=policy,
        completes=step_part.completes,
        gradient_scale=step_part.gradient_scale,
    )


def _prefix_rows(rows: Sequence[Row]) -> list[TokenIds]:
    """Return what prefixes of rows are compared by: token ids, with images their keys."""
    digests = sorted({span.digest for row in rows for span in row.images})
    if not digests:
        return [row.token_ids for row in rows]
    return [token_keys(row.token_ids, row.images, digests) for row in rows]


@dataclass(frozen=True, slots=True)
class _WeightedRow:
    row: Row
    weight_T: NDArray[np.float32]


@dataclass(slots=True)
class _SequenceNumbers:
    """Numbers of the sequences of a batch, in the order in which they are packed, and their trained tokens."""

    numbers: dict[SequenceKey, int] = field(default_factory=dict)
    trained_tokens: Counter[int] = field(default_factory=Counter)
    micro_batches: Counter[int] = field(default_factory=Counter)

    def add(self, rows: Sequence[_WeightedRow]) -> tuple[int, ...]:
        """Add the rows of a micro-batch, and return the number of each row's sequence."""
        numbers = tuple(self.numbers.setdefault(sequence_key(weighted.row.key), len(self.numbers)) for weighted in rows)
        for number, weighted in zip(numbers, rows, strict=True):
            self.trained_tokens[number] += int((weighted.weight_T > 0).sum())
        self.micro_batches.update({*numbers})
        return numbers

    def sizes(self) -> tuple[int, ...]:
        """Return how many trained tokens each sequence has."""
        return tuple(self.trained_tokens[number] for number in range(len(self.numbers)))

    def are_divided(self) -> bool:
        """Return whether a sequence has rows in several micro-batches."""
        return any(count > 1 for count in self.micro_batches.values())


def _micro_batch(
    rows: Sequence[_WeightedRow],
    division: Division,
    options: PackOptions,
    signals: RowSignals,
    sequences: _SequenceNumbers,
    *,
    replays_support: bool,
) -> MicroBatch:
    """Return rows as tensors; without rows they are padding only."""
    ends = np.cumsum([0, *(len(weighted.row.token_ids) for weighted in rows)])
    length = -(-max(int(ends[-1]), 1) // MULTIPLE) * MULTIPLE
    slices = [slice(int(start), int(end)) for start, end in itertools.pairwise(ends)]
    token_ids, positions = np.full(length, options.pad_id, np.int64), np.zeros(length, np.int64)
    row_L, versions, requests = (np.full(length, -1, np.int32) for _ in range(3))
    provenance = np.zeros(length, np.uint8)
    weight, logprobs = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for number, (tokens, weighted) in enumerate(zip(slices, rows, strict=True)):
        row = weighted.row
        token_ids[tokens] = row.token_ids
        positions[tokens] = np.arange(len(row.token_ids))
        row_L[tokens] = number
        provenance[tokens] = row.provenance
        versions[tokens] = row.versions
        requests[tokens] = row.requests
        logprobs[tokens] = row.logprobs
        weight[tokens] = weighted.weight_T
    positions[ends[-1] :] = np.arange(length - ends[-1])
    mask = weight > 0

    def signal(values: RowValues) -> NDArray[np.float32]:
        packed_L = np.zeros(length, np.float32)
        for tokens, weighted in zip(slices, rows, strict=True):
            packed_L[tokens] = values[weighted.row.key]
        return packed_L

    def optional(values: RowValues | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(signal(values))

    advantages = np.zeros(length, np.float32) if signals.advantages is None else signal(signals.advantages)
    keys = tuple(weighted.row.key for weighted in rows)
    return MicroBatch(
        token_ids_L=torch.from_numpy(token_ids),
        position_ids_L=torch.from_numpy(positions),
        row_L=torch.from_numpy(row_L),
        mask_L=torch.from_numpy(mask),
        weight_L=torch.from_numpy(weight),
        advantages_L=torch.from_numpy(advantages * mask),
        logprobs_L=torch.from_numpy(logprobs),
        provenance_L=torch.from_numpy(provenance),
        versions_L=torch.from_numpy(versions),
        requests_L=torch.from_numpy(requests),
        keys=keys,
        sequences=sequences.add(rows),
        sources=tuple(options.sources.index(task_source_name(key.prompt_id)) for key in keys)
        if options.sources
        else (),
        shares_prefixes=division.shares_prefixes,
        learner_logprobs_L=optional(signals.learner_logprobs),
        correction_L=optional(signals.correction),
        values_L=optional(signals.values),
        returns_L=optional(signals.returns),
        experts_L=packed_experts([weighted.row.experts for weighted in rows], slices, length),
        support=packed_support([weighted.row for weighted in rows], length) if replays_support else None,
        images=tuple(
            PlacedImage(replace(span, start=tokens.start + span.start), signals.images[span.digest])
            for tokens, weighted in zip(slices, rows, strict=True)
            for span in weighted.row.images
        ),
    )


def _metrics(rows: Sequence[Row], micro: Sequence[MicroBatch], divisions: Sequence[Division]) -> dict[str, float]:
    tokens = sum(len(row.token_ids) for row in rows)
    padded = sum(batch.token_ids_L.numel() for batch in micro)
    computed = sum(division.computed_tokens for division in divisions)
    image_tokens = sum(int(batch.image_mask_L.sum()) for batch in micro)
    return {
        "batch/rows": float(len(rows)),
        "batch/tokens": float(tokens),
        "batch/trained_tokens": float(sum(int(batch.mask_L.sum()) for batch in micro)),
        "batch/padding_share": 1 - tokens / padded,
        "batch/shared_share": 1 - computed / max(1, tokens),
        "batch/micro_batches": float(len(micro)),
        **({"batch/image_share": image_tokens / tokens} if image_tokens else {}),
    }
