"""The optimizer's configuration by role, and its learning rate by step, for every learner backend."""

from __future__ import annotations

from pathlib import Path

from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import Role
from agentrl.models.learning_rates import resolve_optimizer


def config_of_role(config: LearnerConfig, algo: AlgoConfig, folder: Path, role: Role) -> LearnerConfig:
    """Return the configuration of a policy's or a critic's learner, whose initial weights are in ``folder``, without ``auto``."""
    if role == "critic":
        config = config.model_copy(update={"optimizer": algo.critic.optimizer, "freeze": [], "lora": None})
    optimizer = resolve_optimizer(config.optimizer, folder, role, lora=config.lora is not None)
    return config.model_copy(update={"optimizer": optimizer})


def learning_rate(config: OptimizerConfig, step: int, scale: float) -> float:
    """Return the learning rate after ``step`` finished steps: linear warm-up, times the schedule's factor."""
    steps = config.fixed_warmup_steps
    warm = min(1.0, (step + 1) / steps) if steps else 1.0
    return config.fixed_lr * warm * scale
