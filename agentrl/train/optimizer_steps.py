"""Which rollouts each optimizer step of a training step trains on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from agentrl.batch.groups import RolloutGroups
from agentrl.config.schema import Config


def advantages_by_step(
    config: Config, groups: RolloutGroups, advantages: Mapping[str, float]
) -> list[dict[str, float]]:
    """Divide the advantages into those of the ``train.steps_per_rollout`` optimizer steps; a step without any is left out.

    Groups stay whole: each optimizer step gets the same number of groups, or one more. Rollouts without an advantage,
    such as those of groups whose rewards are all equal, add nothing to the gradient and are left out, also of the
    denominators (DAPO's filter, arXiv:2503.14476, without sampling replacements). They stay if the loss has a KL term or
    an entropy bonus, to which they contribute. Rollouts without a token to train on are left out.

    Args:
        config: of the run.
        groups: rollouts of the training step.
        advantages: by ``rollout_id``; see `agentrl.algo.base.rollout_advantages`.

    """
    steps = []
    for share in np.array_split(np.arange(len(groups.prompt_ids_G)), config.train.steps_per_rollout):
        step = {
            rollout.rollout_id: advantages[rollout.rollout_id]
            for rollout, group in zip(groups.rollouts_N, groups.groups_N, strict=True)
            if group in share
            and (config.algo.trains_everything or advantages[rollout.rollout_id])
            and any(row.mask.any() for row in rollout.rows)
        }
        if step:
            steps.append(step)
    return steps
