"""The contract of sample conversions (``batch.convert``): what a training step trains on, before advantages are computed.

::

    def convert(samples):
        for sample in samples:
            for row in sample.rows:
                row.mask_T[row.turns_T == 0] = False        # the first turn is not trained
            sample.weight = 2.0 if sample.rollout.metadata["hard"] else 1.0
        return [sample for sample in samples if sample.rollout.stop_reason != "max_tokens"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import Rollout, Row


@dataclass(slots=True)
class SampleRow:
    """A training row of a sample, ``T`` tokens. The arrays may be changed in place, or replaced by others of the same length."""

    row: Row
    """The tokens as they were sampled, with arrays that cannot be written: ``token_ids``, ``logprobs``, ``provenance`` …"""
    mask_T: NDArray[np.bool_]
    """Whether each token is trained. True may become False, and never the other way."""
    weight_T: NDArray[np.float32]
    """What each token's loss is multiplied by, 1 at first; 0 takes it out, as ``mask_T`` does. The denominators of means count
    tokens, and not their weights."""
    reward_T: NDArray[np.float32]
    """Reward of each trained token in addition to the rollout's, 0 at first. Estimators of whole rollouts (``grpo``) add them up;
    others (``gae``, ``reinforce_plus_plus``, ``turn_level``) have each at its token or turn."""

    @property
    def turns_T(self) -> NDArray[np.int32]:
        """Index of each sampled token's turn in ``Rollout.turns``; -1 at other tokens."""
        numbers = np.array(self.row.turns or range(len(self.row.request_ids)), np.int32)
        if not len(numbers):
            return np.full(len(self.row.requests), -1, np.int32)
        return np.where(self.row.requests >= 0, numbers[self.row.requests], -1).astype(np.int32)


@dataclass(slots=True)
class TrainingSample:
    """A rollout that a training step trains on."""

    rollout: Rollout
    """The finished rollout; read-only: changes have no effect."""
    rows: list[SampleRow]
    """Its training rows."""
    reward: float
    """The reward that advantages are computed from. ``train/reward`` stays the mean of ``rollout.reward``."""
    weight: float = 1.0
    """What the loss of all its tokens is multiplied by; at least 0."""


ConvertSamples = Callable[[Sequence[TrainingSample]], Sequence[TrainingSample]]
"""``batch.convert``: gets the samples of a training step, those of a task next to each other, and returns those to train on. What
it leaves out is not trained, and not in the baselines of its group. A sample with masks of zeros stays in the baselines."""

PostProcessRewards = Callable[[Sequence[Sequence[Rollout]]], Mapping[str, float]]
"""``algo.reward_post_process``: gets the rollouts of a training step by task, with penalties (``algo.overlong``) taken off their
rewards, and returns the reward of each rollout by ``rollout_id``, from which advantages are computed."""
