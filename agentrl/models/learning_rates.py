"""Learning rates: ``auto`` by the size of the model, and schedules over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from agentrl.config.base import Section
from agentrl.config.learner import OptimizerConfig
from agentrl.config.schema import Config
from agentrl.models.load import count_parameters, empty_model

Use = Literal["policy", "critic", "sft"]
"""What is trained: a policy by RL, its critic, or a policy by SFT."""


@dataclass(frozen=True, slots=True)
class UsualRates:
    """Usual settings for models from a size on."""

    size: int
    """Weights of the smallest model."""
    policy: float
    """Learning rate in RL."""
    critic_or_sft: float
    """Learning rate of critics and in SFT."""
    highest: float
    """Higher learning rates in RL are likely to be a mistake."""
    warmup_steps: int


_USUAL = (
    UsualRates(500_000_000, policy=1e-6, critic_or_sft=1e-5, highest=2e-5, warmup_steps=10),
    UsualRates(50_000_000, policy=5e-5, critic_or_sft=5e-5, highest=2e-4, warmup_steps=3),
    UsualRates(0, policy=3e-4, critic_or_sft=3e-4, highest=math.inf, warmup_steps=0),
)
"""The rates of policies are those of the shipped configurations."""


LORA_FACTOR = 10
"""The best rates of LoRA adapters over those of whole weights, whatever the model and the rank ("LoRA Without Regret", 2025)."""


def usual_rates(weights: int) -> UsualRates:
    """Return the usual settings for a model of that many weights."""
    return next(rates for rates in _USUAL if weights >= rates.size)


def resolve_optimizer(config: OptimizerConfig, folder: Path, use: Use, *, lora: bool = False) -> OptimizerConfig:
    """Return ``config`` with numbers in place of ``auto``, for training the model in ``folder``.

    Args:
        config: of the optimizer.
        folder: of the model.
        use: what is trained.
        lora: whether its adapters are trained, at `LORA_FACTOR` times the rate.

    Raises:
        ModelError: the model's weights cannot be counted.
    """
    if config.lr != "auto" and config.warmup_steps != "auto":
        return config
    usual = usual_rates(count_weights(folder))
    lr = (usual.policy if use == "policy" else usual.critic_or_sft) * (LORA_FACTOR if lora else 1)
    defaults = {"lr": lr, "warmup_steps": usual.warmup_steps}
    return config.model_copy(update={key: value for key, value in defaults.items() if getattr(config, key) == "auto"})


def count_weights(folder: Path) -> int:
    """Return the number of weights of the model in ``folder``.

    Raises:
        ModelError: a file is damaged, or the model's configuration cannot be loaded.
    """
    file = folder / "config.json"
    return count_parameters(folder) or _count_weights(folder, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=16)
def _count_weights(folder: Path, changed_at: int) -> int:
    """Return the number of weights of an architecture, which a run needs for its optimizer and for the line about it."""
    return sum(parameter.numel() for parameter in empty_model(folder, "eager").parameters())


def with_rates(config: Config, policy: Path, critic: Path | None, use: Use = "policy") -> Config:
    """Return ``config`` with numbers in place of ``auto`` for the policy's optimizer, and for that of a critic.

    Raises:
        ModelError: see `resolve_optimizer`.
    """
    learner, algo = config.learner, config.algo
    optimizer = resolve_optimizer(learner.optimizer, policy, use, lora=learner.lora is not None)
    update: dict[str, Section] = {"learner": learner.model_copy(update={"optimizer": optimizer})}
    if critic is not None:
        critic_optimizer = resolve_optimizer(algo.critic.optimizer, critic, "critic")
        update["algo"] = algo.model_copy(
            update={"critic": algo.critic.model_copy(update={"optimizer": critic_optimizer})}
        )
    return config.model_copy(update=update)


def describe_optimizer(config: OptimizerConfig, folder: Path, use: Use, *, lora: bool = False) -> str:
    """Return one line on optimizer, learning rate, warm-up and schedule, and why ``auto`` has its values."""
    resolved, size = resolve_optimizer(config, folder, use, lora=lora), f"auto: {count_weights(folder):,} weights"
    lr = f"learning rate {resolved.lr:g}" + (f" ({size}{', LoRA' if lora else ''})" if config.lr == "auto" else "")
    warmup = f"warm-up {resolved.warmup_steps}" + (f" ({size})" if config.warmup_steps == "auto" else "")
    schedule = config.resolve_schedule("linear" if use == "sft" else "constant")
    end = "" if schedule == "constant" else f" to {config.min_lr_ratio:g} of it"
    return f"{config.name}, {lr}, {warmup}, {schedule}{end}"
