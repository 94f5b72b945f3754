"""What may be trained on in reinforcement learning: only tokens that the policy sampled, only in rollouts with a reward."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch, MicroBatch, span_mask
from agentrl.core.errors import ProvenanceError, UngradedError
from agentrl.core.sampling_support import SamplingSupport, TokenIds
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey

_log = logging.getLogger(__name__)
_IMAGE_FAULT = "it stands for an image"


def check_rows(rows: Iterable[Row]) -> None:
    """Check that every masked token was sampled, with a log-probability, a version and a request, and that every
    unmasked one has a reason.

    Raises:
        ProvenanceError: with the first row and token that breaks this, and what is wrong.
    """
    for row in rows:
        faults = _row_faults(row)
        faults["its mask and the reason for it disagree"] = (row.mask != 0) != (row.mask_reason == MaskReason.NONE)
        for fault, where in faults.items():
            if where.any():
                token = int(where.argmax())
                raise ProvenanceError(_words(row.key, token, int(row.token_ids[token]), fault))


def check_graded(rollouts: Iterable[Rollout]) -> None:
    """Check that all rollouts that were not dropped have a final and finite reward.

    Training steps call this before anything is computed of their rollouts, and the journal's writer before a group counts as
    finished.

    Raises:
        UngradedError: with the first rollout that has none.
    """
    for rollout in rollouts:
        if not rollout.dropped and not (rollout.graded and math.isfinite(rollout.reward)):
            fault = (
                f"has the reward {rollout.reward}" if rollout.graded else "has no reward, as its grader never returned"
            )
            raise UngradedError(
                f"rollout {rollout.rollout_id!r} of task {rollout.prompt_id!r} may not be trained on: it {fault} "
                "(reward.function; else the environment sets the reward)"
            )


def check_temperature(rows: Iterable[Row], temperature: float) -> None:
    """Check that rows were sampled at the ``temperature`` of the learner's log-probabilities.

    Raises:
        ProvenanceError: with the first row that was not.
    """
    for row in rows:
        if row.temperature != temperature:
            raise ProvenanceError(
                f"{_name(row.key)} was sampled at temperature {row.temperature:g}, but the learner's log-probabilities are "
                f"taken at sampler.temperature={temperature:g}: their ratio would mean nothing"
            )


def leave_out(rows: Sequence[Row], weights: Sequence[NDArray[np.float32]], *, needs_support: bool = False) -> int:
    """Set to 0 the ``weights`` ``[T]`` of masked tokens that no engine sampled, log the first, and return their number.

    With ``needs_support`` also those of tokens whose sampling support is not known.
    """
    first: str | None = None
    count = 0
    for row, weight in zip(rows, weights, strict=True):
        faults = _row_faults(row)
        if needs_support:
            faults |= _support_faults(row.mask != 0, row.token_ids, row.support)
        for fault, where in faults.items():
            bad = where & (weight > 0)
            if bad.any():
                token = int(bad.argmax())
                first = first or _words(row.key, token, int(row.token_ids[token]), fault)
                count += int(bad.sum())
                weight[bad] = 0
    if count:
        _log.warning("%d tokens are left out of the loss (train.provenance=warn). The first: %s", count, first)
    return count


def check_provenance(batch: GlobalBatch) -> None:
    """Check that every masked token was sampled, with a log-probability, a version and a request, unless it is supervised.

    Learner groups call this on the driver before any rank gets its share, so that the ranks stay usable after a refused
    batch.

    Raises:
        ProvenanceError: with the first row and token that breaks this, and what is wrong.
    """
    if batch.kind == "sft":
        return
    for micro in (micro for share in batch.micro for micro in share):
        faults = _micro_faults(micro)
        if faults:
            raise ProvenanceError(f"{_first(micro, faults)}; train.provenance=warn leaves such tokens out of the loss")


def _row_faults(row: Row) -> dict[str, NDArray[np.bool_]]:
    """Return masks ``[T]`` of the faulty tokens, by fault."""
    requests = np.where(row.requests < len(row.request_ids), row.requests, -1)
    mask = row.mask != 0
    faults = _faults(mask, row.provenance, row.logprobs, row.versions, requests)
    faults[_IMAGE_FAULT] = mask & span_mask(len(mask), row.images)
    return faults


def _micro_faults(batch: MicroBatch) -> dict[str, NDArray[np.bool_]]:
    """Return masks ``[L]`` of the faulty tokens, by fault."""
    faults = _faults(
        batch.mask_L.numpy(),
        batch.provenance_L.numpy(),
        batch.logprobs_L.numpy(),
        batch.versions_L.numpy(),
        batch.requests_L.numpy(),
    )
    faults[_IMAGE_FAULT] = (batch.mask_L & batch.image_mask_L).numpy()
    faults["it is padding"] = batch.mask_L.numpy() & (batch.row_L.numpy() < 0)
    if batch.support is not None:
        faults |= _support_faults(batch.mask_L.numpy(), batch.token_ids_L.numpy(), batch.support)
    return {fault: where for fault, where in faults.items() if where.any()}


def _first(batch: MicroBatch, faults: dict[str, NDArray[np.bool_]]) -> str:
    """Describe the first token with a fault."""
    fault, where = next(iter(faults.items()))
    at = int(where.argmax())
    row = int(batch.row_L[at])
    key = batch.keys[row] if row >= 0 else None
    return _words(key, int(batch.position_ids_L[at]), int(batch.token_ids_L[at]), fault)


def _faults(
    mask: NDArray[np.bool_],
    provenance: NDArray[np.uint8],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
    requests: NDArray[np.int32],
) -> dict[str, NDArray[np.bool_]]:
    """Return the faulty masked tokens, by fault."""
    return {
        "no engine sampled it": mask & (provenance != Provenance.SAMPLED),
        "its log-probability is not a finite number of at most 0": mask & ~(np.isfinite(logprobs) & (logprobs <= 0)),
        "it has no policy version": mask & (versions < 0),
        "it has no request": mask & (requests < 0),
    }


def _support_faults(
    mask: NDArray[np.bool_], token_ids: TokenIds, support: SamplingSupport | None
) -> dict[str, NDArray[np.bool_]]:
    """Return the masked tokens that are none of the ids that they were sampled from, by fault."""
    is_known = np.zeros(len(mask), np.bool_) if support is None else support.contains(token_ids)
    return {"its sampling support (sampler.renormalise=engine) was not recorded, or lacks it": mask & ~is_known}


def _words(key: RowKey | None, token: int, token_id: int, fault: str) -> str:
    name = _name(key) if key else "a padded place"
    return f"token {token} (id {token_id}) of {name} may not be trained on: {fault}"


def _name(key: RowKey) -> str:
    return f"row {key.row} of rollout {key.rollout_id!r}, agent {key.agent_id!r}"
