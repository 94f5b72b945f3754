"""Rewards between the end of episodes and the estimator: penalties, and a function of the user (``algo.reward_post_process``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from agentrl.batch.groups import RolloutGroups
from agentrl.config.algo import AlgoConfig, OverlongConfig
from agentrl.core.errors import ConfigError
from agentrl.core.imports import load_function
from agentrl.core.training_sample import PostProcessRewards
from agentrl.core.types import Rollout
from agentrl.core.user_code import calling

KEY = "algo.reward_post_process"


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """Return what a rollout of so many sampled tokens loses.

    Source: DAPO, arXiv:2503.14476, equation 13: nothing up to ``max_tokens - buffer_tokens``, then linearly more up to
    ``penalty`` at ``max_tokens``, and not more beyond.
    """
    if config.max_tokens is None:
        return 0.0
    over = tokens - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(1.0, max(0.0, over / config.buffer_tokens))


def load_post_process(reference: str | None) -> PostProcessRewards | None:
    """Return the function that ``algo.reward_post_process`` names, or None without one.

    Raises:
        ConfigError: it does not exist, or is no function of one argument.
    """
    if reference is None:
        return None
    return load_function(reference, KEY, "groups")


def shape_rewards(groups: RolloutGroups, algo: AlgoConfig) -> RolloutGroups:
    """Return the groups with the rewards that advantages are computed from; the given rollouts stay as they are.

    Raises:
        ConfigError: the function of the user raises, or does not return a finite number for each rollout.
    """
    if algo.overlong.max_tokens is not None:
        groups = _with_rewards(
            groups,
            {
                rollout.rollout_id: rollout.reward - overlong_penalty(rollout.sampled_tokens, algo.overlong)
                for rollout in groups.rollouts_N
            },
        )
    function = load_post_process(algo.reward_post_process)
    if function is None or not groups.rollouts_N:
        return groups
    by_task: list[list[Rollout]] = [[] for _ in groups.prompt_ids_G]
    for rollout, group in zip(groups.rollouts_N, groups.groups_N.tolist(), strict=True):
        by_task[group].append(replace(rollout, metrics=dict(rollout.metrics)))
    name = f"{KEY}={algo.reward_post_process}"
    with calling(name):
        returned = function(by_task)
    return _with_rewards(groups, _check_rewards(name, returned, [rollout.rollout_id for rollout in groups.rollouts_N]))


def _check_rewards(name: str, returned: object, rollout_ids: list[str]) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{name} returned {returned!r:.100}; it must return a mapping of rewards by rollout_id")
    if unknown := [key for key in returned if key not in rollout_ids]:
        raise ConfigError(f"{name} returned a reward for {unknown[0]!r:.100}, which is no rollout_id of the step")
    rewards = {}
    for rollout_id in rollout_ids:
        if rollout_id not in returned:
            raise ConfigError(f"{name} returned no reward for rollout {rollout_id!r}; each needs one")
        try:
            rewards[rollout_id] = float(returned[rollout_id])
        except (TypeError, ValueError, OverflowError):
            rewards[rollout_id] = math.nan
        if not math.isfinite(rewards[rollout_id]):
            raise ConfigError(
                f"{name} returned the reward {returned[rollout_id]!r:.50} for rollout {rollout_id!r}; it must be a finite number"
            )
    return rewards


def _with_rewards(groups: RolloutGroups, rewards: Mapping[str, float]) -> RolloutGroups:
    rollouts_N = tuple(replace(rollout, reward=rewards[rollout.rollout_id]) for rollout in groups.rollouts_N)
    return replace(groups, rollouts_N=rollouts_N)
