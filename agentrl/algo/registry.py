"""The estimators of ``algo.advantage.name`` and the losses of ``algo.loss.name``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agentrl.algo.advantages.agent_turns import agent_norm, at_grpo
from agentrl.algo.advantages.gae import gae
from agentrl.algo.advantages.grpo import grpo
from agentrl.algo.advantages.maxrl import maxrl
from agentrl.algo.advantages.rae import rae
from agentrl.algo.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from agentrl.algo.advantages.rloo import rloo
from agentrl.algo.advantages.role_groups import hierarchical_grpo, seat_grpo
from agentrl.algo.advantages.turn_level import turn_level
from agentrl.algo.base import AdvantageEstimator, Loss
from agentrl.algo.losses.cispo import cispo
from agentrl.algo.losses.dppo import dppo
from agentrl.algo.losses.gspo import gspo
from agentrl.algo.losses.ppo_clip import ppo_clip
from agentrl.algo.losses.reinforce import reinforce
from agentrl.algo.losses.sft import sft_loss
from agentrl.algo.losses.value import ValueLoss
from agentrl.algo.policy_objective import PolicyObjective
from agentrl.config.algo import ADVANTAGES, LOSSES, AdvantageConfig, AlgoConfig, LossConfig, NoOptions, parse_options
from agentrl.core.imports import is_reference, load_object

ESTIMATORS: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "maxrl": maxrl,
    "gae": gae,
    "turn_level": turn_level,
    "rae": rae,
    "at_grpo": at_grpo,
    "hierarchical_grpo": hierarchical_grpo,
    "seat_grpo": seat_grpo,
    "agent_norm": agent_norm,
}
"""By name; each takes an `AdvantageInput`, and its options if it has any."""
POLICY_LOSSES: dict[str, Callable[..., Any]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gspo_token": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "dppo": dppo,
}
"""By name; each is a `PolicyLoss` that takes its options last, if it has any."""


def make_estimator(config: AdvantageConfig) -> AdvantageEstimator:
    """Return the estimator of a configuration.

    Raises:
        ConfigError: a function by import path does not exist, or options do not fit.
    """
    return _with_options("algo.advantage", config, ESTIMATORS, ADVANTAGES)


def make_objective(config: AlgoConfig) -> PolicyObjective:
    """Return the objective of a configuration, with the policy loss of each source of a mixed run.

    Raises:
        ConfigError: as `make_estimator`.
    """
    chosen = [each.loss for each in config.by_source.values()]
    if all(one == chosen[0] for one in chosen):
        chosen = chosen[:1]
    return PolicyObjective(config, [_with_options("algo.loss", one, POLICY_LOSSES, LOSSES) for one in chosen])


def make_losses(config: AlgoConfig, objective: PolicyObjective) -> dict[str, Loss]:
    """Return the loss of each kind of batch."""
    return {"rl": objective, "sft": sft_loss, "value": ValueLoss(config.critic.value_clip)}


def _with_options(
    key: str, config: AdvantageConfig | LossConfig, known: dict[str, Callable[..., Any]], options: dict[str, Any]
) -> Callable[..., Any]:
    if is_reference(config.name):
        return partial(load_object(config.name, f"{key}.name"), **config.options)
    parsed = parse_options(key, config, options)
    return known[config.name] if isinstance(parsed, NoOptions) else partial(known[config.name], options=parsed)
