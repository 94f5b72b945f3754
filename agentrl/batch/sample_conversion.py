"""Sample conversions of users (``batch.convert``): they choose, mask, weigh and reward samples; what was sampled stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agentrl.batch.sequences import RowValues
from agentrl.core.errors import ConfigError
from agentrl.core.imports import load_function
from agentrl.core.training_sample import ConvertSamples, SampleRow, TrainingSample
from agentrl.core.types import MaskReason, Rollout, Row
from agentrl.core.user_code import calling, is_finite

KEY = "batch.convert"


@dataclass(frozen=True, slots=True)
class ConvertedSamples:
    """The rollouts of a training step as a conversion has left them."""

    rollouts: list[Rollout]
    """To train on: rows with the ids, log-probabilities, versions and requests that were sampled, and with the new masks."""
    rewards: RowValues = field(default_factory=dict)
    """By row ``[T]``, the rewards of tokens; empty if there are none."""
    weights: RowValues | None = None
    """By row ``[T]``, the weights of tokens; None if all are 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """``batch/convert/…``."""


def load_convert(reference: str | None) -> ConvertSamples | None:
    """Return the function that ``batch.convert`` names, or None without one.

    Raises:
        ConfigError: it does not exist, or is no function of one argument.
    """
    if reference is None:
        return None
    return load_function(reference, KEY, "samples")


def convert_samples(convert: ConvertSamples, reference: str, rollouts: Iterable[Rollout]) -> ConvertedSamples:
    """Return the rollouts of a training step after a conversion of the user.

    Args:
        convert: the function.
        reference: the value of ``batch.convert``, for messages.
        rollouts: of the step; those that were dropped are left out.

    Raises:
        ConfigError: the function raises or breaks its contract; the message names the rollout and what to change.
    """
    originals = {rollout.rollout_id: rollout for rollout in rollouts if not rollout.dropped}
    with calling(f"{KEY}={reference}"):
        returned = convert([_as_sample(rollout) for rollout in originals.values()])
    name = f"{KEY}={reference}"
    if not isinstance(returned, Sequence) or not all(isinstance(sample, TrainingSample) for sample in returned):
        raise ConfigError(f"{name} returned {returned!r:.100}; it must return a sequence of the samples that it got")
    converted: dict[str, Rollout] = {}
    rewards: dict[object, NDArray[np.float32]] = {}
    weights: dict[object, NDArray[np.float32]] = {}
    for sample in returned:
        rollout_id = sample.rollout.rollout_id
        if rollout_id not in originals or rollout_id in converted:
            fault = "twice" if rollout_id in converted else "which it did not get"
            raise ConfigError(f"{name} returned rollout {rollout_id!r} {fault}; each sample may be returned once")
        original = originals[rollout_id]
        _check(name, sample, original)
        rows = [_mask_row(row, changed, sample.weight) for row, changed in zip(original.rows, sample.rows, strict=True)]
        converted[rollout_id] = replace(original, rows=rows, reward=float(sample.reward), record=b"")
        for row, changed in zip(rows, sample.rows, strict=True):
            rewards[row.key] = np.asarray(changed.reward_T, np.float32)
            weights[row.key] = np.asarray(changed.weight_T, np.float32) * np.float32(sample.weight)
    trained_rollouts = [converted[rollout_id] for rollout_id in originals if rollout_id in converted]
    is_rewarded = any(reward_T.any() for reward_T in rewards.values())
    is_weighted = any((weight_T != 1).any() for weight_T in weights.values())
    return ConvertedSamples(
        trained_rollouts,
        rewards if is_rewarded else {},  # type: ignore[arg-type]
        weights if is_weighted else None,  # type: ignore[arg-type]
        _metrics(originals, converted),
    )


def _as_sample(rollout: Rollout) -> TrainingSample:
    rows = [
        SampleRow(
            _read_only(row),
            row.mask.astype(bool),
            np.ones(len(row.mask), np.float32),
            np.zeros(len(row.mask), np.float32),
        )
        for row in rollout.rows
    ]
    copy = replace(rollout, rows=[row.row for row in rows], metrics=dict(rollout.metrics), record=b"")
    return TrainingSample(copy, rows, rollout.reward)


def _read_only(row: Row) -> Row:
    """Return the row with views of its arrays that cannot be written."""
    names = ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests")
    views = {name: getattr(row, name).view() for name in names}
    for view in views.values():
        view.flags.writeable = False
    return replace(row, **views)


def _mask_row(row: Row, changed: SampleRow, weight: float) -> Row:
    """Return the sampled row with the tokens out of the loss that the conversion has masked."""
    trained_T = np.asarray(changed.mask_T, bool) & (np.asarray(changed.weight_T) * weight > 0)
    removed_T = row.mask.astype(bool) & ~trained_T
    if not removed_T.any():
        return row
    mask, reason = row.mask.copy(), row.mask_reason.copy()
    mask[removed_T], reason[removed_T] = 0, MaskReason.CONVERTED
    return replace(row, mask=mask, mask_reason=reason)


def _check(name: str, sample: TrainingSample, original: Rollout) -> None:
    where = f"{name}: rollout {original.rollout_id!r}"
    if not _is_finite(sample.reward):
        raise ConfigError(f"{where} has the reward {sample.reward!r:.50}; it must be a finite number")
    if not _is_finite(sample.weight) or sample.weight < 0:
        raise ConfigError(f"{where} has the weight {sample.weight!r:.50}; it must be a finite number of at least 0")
    if len(sample.rows) != len(original.rows):
        raise ConfigError(
            f"{where} has {len(sample.rows)} rows, and {len(original.rows)} were sampled; mask rows that are not to be trained"
        )
    for row, changed in zip(original.rows, sample.rows, strict=True):
        size = len(row.mask)
        for field_name in ("mask_T", "weight_T", "reward_T"):
            values = np.asarray(getattr(changed, field_name))
            if values.shape != (size,):
                raise ConfigError(
                    f"{where}: {field_name} of row {row.key.row} has the shape {values.shape}, not ({size},)"
                )
            if not np.issubdtype(values.dtype, np.number) and values.dtype != bool:
                raise ConfigError(
                    f"{where}: {field_name} of row {row.key.row} has the dtype {values.dtype}, and no numbers"
                )
            if not np.isfinite(values).all():
                raise ConfigError(f"{where}: {field_name} of row {row.key.row} has a value that is not finite")
        mask_T = np.asarray(changed.mask_T, bool)
        if added := int((mask_T & (row.mask == 0)).sum()):
            raise ConfigError(
                f"{where}: mask_T of row {row.key.row} has {added} tokens that were not trained before; a conversion takes "
                "tokens out of the loss, and adds none"
            )
        if (np.asarray(changed.weight_T) < 0).any():
            raise ConfigError(f"{where}: weight_T of row {row.key.row} has a negative weight; set it to 0 or more")
        if (np.asarray(changed.reward_T)[~mask_T] != 0).any():
            raise ConfigError(
                f"{where}: reward_T of row {row.key.row} has a reward at a token that is not trained; give it to one in mask_T"
            )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float | np.number) and is_finite(value)


def _metrics(originals: Mapping[str, Rollout], converted: Mapping[str, Rollout]) -> dict[str, float]:
    def count_trained(rollouts: Iterable[Rollout]) -> int:
        return sum(int((row.mask != 0).sum()) for rollout in rollouts for row in rollout.rows)

    trained_tokens = count_trained(originals[rollout_id] for rollout_id in converted)
    return {
        "batch/convert/dropped": float(len(originals) - len(converted)),
        "batch/convert/masked_share": 1 - count_trained(converted.values()) / max(1, trained_tokens),
    }
