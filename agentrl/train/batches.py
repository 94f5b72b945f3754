"""The global batches of a training step, from its rollouts and their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.schema import Config
from agentrl.core.types import Rollout


def train_batches(
    config: Config, rollouts: Sequence[Rollout], advantages: Mapping[str, float], pad_id: int
) -> list[GlobalBatch]:
    """Return a batch for each of the ``train.steps_per_rollout`` optimizer steps that has anything to train on.

    Groups stay whole: each optimizer step gets the same number of groups, or one more. Rollouts without an advantage,
    such as those of groups whose rewards are all equal, add nothing to the gradient and are left out, also of the
    denominators (DAPO's filter, arXiv:2503.14476, without sampling replacements). They stay if the loss has a KL term or
    an entropy bonus, to which they contribute.

    Args:
        config: of the run.
        rollouts: of the step; dropped ones are left out.
        advantages: by ``rollout_id``; see `agentrl.algo.base.rollout_advantages`.
        pad_id: the pad token.

    """
    usable = [rollout for rollout in rollouts if not rollout.dropped]
    prompts = list(dict.fromkeys(rollout.prompt_id for rollout in usable))
    batches = []
    for share in np.array_split(np.arange(len(prompts)), config.train.steps_per_rollout):
        chosen = {prompts[index] for index in share}
        rows = [
            row
            for rollout in usable
            if rollout.prompt_id in chosen and (config.algo.trains_everything or advantages[rollout.rollout_id])
            for row in rollout.rows
            if row.mask.any()
        ]
        if not rows:
            continue
        batch = pack(
            rows,
            advantages,
            ranks=config.learner.ranks,
            tokens_per_bin=config.batch.tokens_per_bin,
            tokens_per_micro=config.batch.tokens_per_micro,
            pad_id=pad_id,
            aggregation=config.batch.aggregation,
            temperature=config.sampler.temperature,
            provenance=config.train.provenance,
        )
        batches.append(batch)
    return batches
