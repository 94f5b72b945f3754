"""In reinforcement learning, mask 1 means that the policy sampled the token. A batch that breaks this is refused."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch, MicroBatch
from agentrl.errors import ProvenanceError
from agentrl.types import MaskReason, Provenance, Row, RowKey


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
                raise _refusal(row.key, token, int(row.token_ids[token]), fault)


def check_batch(batch: GlobalBatch) -> None:
    """Check every micro-batch of an ``rl`` batch; see `check_micro_batch`."""
    if batch.kind == "rl":
        for rank in batch.micro:
            for micro in rank:
                check_micro_batch(micro)


def check_micro_batch(batch: MicroBatch) -> None:
    """Check that every masked token was sampled, with a log-probability, a version and a request.

    Raises:
        ProvenanceError: with the first row and token that breaks this, and what is wrong.
    """
    faults = _faults(
        batch.mask_R_L.numpy(),
        batch.provenance_R_L.numpy(),
        batch.logprobs_R_L.numpy(),
        batch.versions_R_L.numpy(),
        batch.requests_R_L.numpy(),
    )
    faults["it is padding"] = batch.mask_R_L.numpy() & (batch.row_R_L.numpy() < 0)
    for fault, where in faults.items():
        if where.any():
            at = tuple(torch.from_numpy(where).nonzero()[0].tolist())
            row = int(batch.row_R_L[at])
            key = batch.keys[row] if row >= 0 else None
            raise _refusal(key, int(batch.position_ids_R_L[at]), int(batch.token_ids_R_L[at]), fault)


def _faults(
    mask: NDArray[np.bool_],
    provenance: NDArray[np.uint8],
    logprobs: NDArray[np.float32],
    versions: NDArray[np.int32],
    requests: NDArray[np.int32],
) -> dict[str, NDArray[np.bool_]]:
    """Return by fault which masked tokens have it."""
    return {
        "no engine sampled it": mask & (provenance != Provenance.SAMPLED),
        "its log-probability is not a finite number of at most 0": mask & ~(np.isfinite(logprobs) & (logprobs <= 0)),
        "it has no policy version": mask & (versions < 0),
        "it has no request": mask & (requests < 0),
    }


def _refusal(key: RowKey | None, token: int, token_id: int, fault: str) -> ProvenanceError:
    name = f"row {key.row} of rollout {key.rollout_id!r}, agent {key.agent_id!r}" if key else "a padded place"
    return ProvenanceError(f"token {token} (id {token_id}) of {name} may not be trained on: {fault}")
