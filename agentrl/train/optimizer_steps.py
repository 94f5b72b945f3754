"""Which rollouts each optimizer step of a training step trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.batch.groups import RolloutGroups
from agentrl.config.schema import Config
from agentrl.core.types import Rollout


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


def nothing_trained(config: Config, rollouts: Sequence[Rollout], groups: RolloutGroups) -> str:
    """Return why a training step has no optimizer step, with the key to change."""
    if not groups.rollouts_N:
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in Counter(one.kind for one in failures).items())
        first = f" (failures: {kinds}; the first: {failures[0].error}: {failures[0].message})" if failures else ""
        return f"all {len(rollouts)} episodes were dropped{first}; rollout.failure sets what follows a failure"
    if config.rollout.n_samples_per_prompt == 1:
        return (
            "rollout.n_samples_per_prompt=1, but an advantage compares the rewards of a task's rollouts; "
            "set rollout.n_samples_per_prompt to 4 or more"
        )
    if groups.flat_share == 1:
        rewards_N = groups.rewards_N
        return (
            f"the rollouts of each task have equal rewards (from {rewards_N.min():g} to {rewards_N.max():g} over "
            f"{len(groups.prompt_ids_G)} tasks, {groups.dropped} of {len(rollouts)} episodes dropped), so no advantage is "
            "left; raise rollout.n_samples_per_prompt or sampler.temperature, or take tasks that the policy sometimes solves"
        )
    return "no rollout with an advantage has a token to train on"
