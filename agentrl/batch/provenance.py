"""In reinforcement learning, mask 1 means that the policy sampled the token. A batch that breaks this is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.microbatch import GlobalBatch, MicroBatch, ProvenanceRule
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
    """Check that rows were sampled at the ``temperature`` at which the learner will take log-probabilities.

    Raises:
        ProvenanceError: with the first row that was not.
    """
    for row in rows:
        if row.temperature != temperature:
            raise ProvenanceError(
                f"{_name(row.key)} was sampled at temperature {row.temperature:g}, but the learner's log-probabilities are "
                f"taken at sampler.temperature={temperature:g}: their ratio would mean nothing"
            )


def check_batch(batch: GlobalBatch) -> None:
    """Check on the driver that every masked token of an ``rl`` batch was sampled, with a log-probability, a version and
    a request. The ranks check again: see `admit`.

    Under ``warn`` the first token that was not is logged, with how many there are.

    Raises:
        ProvenanceError: under ``strict``, with the first row and token that breaks this, and what is wrong.
    """
    if batch.kind != "rl":
        return
    found = [_first(micro, faults) for rank in batch.micro for micro in rank if (faults := _micro_faults(micro))]
    if not found:
        return
    if batch.provenance == "strict":
        raise _refusal(found[0])
    count = sum(admit(rank, batch.provenance)[1] for rank in batch.micro)
    _log.warning("%d tokens are left out of the loss (train.provenance=warn). The first: %s", count, found[0])


def admit(batches: Sequence[MicroBatch], rule: ProvenanceRule) -> tuple[tuple[MicroBatch, ...], int]:
    """Return what may be trained on of a rank's ``rl`` micro-batches, and how many masked tokens may not.

    Under ``warn`` those tokens lose mask, weight and advantage. The others keep their shares of the global batch.

    Raises:
        ProvenanceError: under ``strict``, where there is such a token.
    """
    admitted: list[MicroBatch] = []
    count = 0
    for batch in batches:
        faults = _micro_faults(batch)
        if faults and rule == "strict":
            raise _refusal(_first(batch, faults))
        if faults:
            bad = torch.from_numpy(np.logical_or.reduce(list(faults.values())))
            count += int(bad.sum())
            batch = replace(
                batch,
                mask_R_L=batch.mask_R_L & ~bad,
                weight_R_L=batch.weight_R_L.masked_fill(bad, 0),
                advantages_R_L=batch.advantages_R_L.masked_fill(bad, 0),
            )
        admitted.append(batch)
    return tuple(admitted), count


def _micro_faults(batch: MicroBatch) -> dict[str, NDArray[np.bool_]]:
    """Return by fault, for those that there are, which tokens ``[R, L]`` have it."""
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
    """Return the first token with a fault in words."""
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
    """Return by fault which masked tokens have it."""
    return {
        "no engine sampled it": mask & (provenance != Provenance.SAMPLED),
        "its log-probability is not a finite number of at most 0": mask & ~(np.isfinite(logprobs) & (logprobs <= 0)),
        "it has no policy version": mask & (versions < 0),
        "it has no request": mask & (requests < 0),
    }


def _refusal(words: str) -> ProvenanceError:
    return ProvenanceError(f"{words}; train.provenance=warn would leave it out of the loss")


def _words(key: RowKey | None, token: int, token_id: int, fault: str) -> str:
    name = _name(key) if key else "a padded place"
    return f"token {token} (id {token_id}) of {name} may not be trained on: {fault}"


def _name(key: RowKey) -> str:
    return f"row {key.row} of rollout {key.rollout_id!r}, agent {key.agent_id!r}"
