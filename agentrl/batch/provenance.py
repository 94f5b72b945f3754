"""Provenance checks: in reinforcement learning, only tokens that the policy sampled are trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch, MicroBatch
from agentrl.core.errors import ProvenanceError
from agentrl.core.types import MaskReason, Provenance, Row, RowKey

_log = logging.getLogger(__name__)


def check_rows(rows: Iterable[Row]) -> None:
    """Check that every masked token was sampled, with a log-probability, a version and a request, and that every
    unmasked one has a reason.

    Raises:
        ProvenanceError: with the first row and token that breaks this, and what is wrong.
    """
    for row in rows:
        requests = np.where(row.requests < len(row.request_ids), row.requests, -1)
        faults = _faults(row.mask != 0, row.provenance, row.logprobs, row.versions, requests)
        faults["its mask and the reason for it disagree"] = (row.mask != 0) != (row.mask_reason == MaskReason.NONE)
        for fault, where in faults.items():
            if where.any():
                token = int(where.argmax())
                raise ProvenanceError(_words(row.key, token, int(row.token_ids[token]), fault))


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


def admit(batch: GlobalBatch) -> tuple[GlobalBatch, dict[str, float]]:
    """Return what may be trained on of a batch, and the metric ``train/provenance_faults``: the masked tokens left out.

    Learner groups call this on the driver before any rank gets its share, so that the ranks stay usable after a refused
    batch. Every masked token of an ``rl`` batch must be sampled, with a log-probability, a version and a request. Under
    ``warn`` other tokens lose mask, weight and advantage, and the first is logged; the rest keep their shares of the
    global batch. Batches of other kinds are returned unchanged, without a metric.

    Raises:
        ProvenanceError: under ``strict``, with the first row and token that breaks this, and what is wrong.
    """
    if batch.kind != "rl":
        return batch, {}
    first: str | None = None
    count = 0
    shares = []
    for rank in batch.micro:
        share = []
        for micro in rank:
            faults = _micro_faults(micro)
            if faults:
                first = first or _first(micro, faults)
                if batch.provenance == "strict":
                    raise ProvenanceError(f"{first}; train.provenance=warn would leave it out of the loss")
                bad = torch.from_numpy(np.logical_or.reduce(list(faults.values())))
                count += int(bad.sum())
                micro = _without(micro, bad)
            share.append(micro)
        shares.append(tuple(share))
    if count:
        _log.warning("%d tokens are left out of the loss (train.provenance=warn). The first: %s", count, first)
        batch = replace(batch, micro=tuple(shares))
    return batch, {"train/provenance_faults": float(count)}


def _without(micro: MicroBatch, bad_R_L: torch.Tensor) -> MicroBatch:
    """Return the micro-batch with tokens taken out of the loss."""
    return replace(
        micro,
        mask_R_L=micro.mask_R_L & ~bad_R_L,
        weight_R_L=micro.weight_R_L.masked_fill(bad_R_L, 0),
        advantages_R_L=micro.advantages_R_L.masked_fill(bad_R_L, 0),
    )


def _micro_faults(batch: MicroBatch) -> dict[str, NDArray[np.bool_]]:
    """Return masks ``[R, L]`` of the faulty tokens, by fault."""
    faults = _faults(
        batch.mask_R_L.numpy(),
        batch.provenance_R_L.numpy(),
        batch.logprobs_R_L.numpy(),
        batch.versions_R_L.numpy(),
        batch.requests_R_L.numpy(),
    )
    faults["it is padding"] = batch.mask_R_L.numpy() & (batch.row_R_L.numpy() < 0)
    return {fault: where for fault, where in faults.items() if where.any()}


def _first(batch: MicroBatch, faults: dict[str, NDArray[np.bool_]]) -> str:
    """Describe the first token with a fault."""
    fault, where = next(iter(faults.items()))
    at = tuple(torch.from_numpy(where).nonzero()[0].tolist())
    row = int(batch.row_R_L[at])
    key = batch.keys[row] if row >= 0 else None
    return _words(key, int(batch.position_ids_R_L[at]), int(batch.token_ids_R_L[at]), fault)


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


def _words(key: RowKey | None, token: int, token_id: int, fault: str) -> str:
    name = _name(key) if key else "a padded place"
    return f"token {token} (id {token_id}) of {name} may not be trained on: {fault}"


def _name(key: RowKey) -> str:
    return f"row {key.row} of rollout {key.rollout_id!r}, agent {key.agent_id!r}"
