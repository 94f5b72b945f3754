"""Lines at the start of a run on what the learner trains."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.learner import Recompute
from agentrl.config.schema import Config
from agentrl.models.freezing import count_trained
from agentrl.models.learning_rates import Use, describe_optimizer
from agentrl.models.load import empty_model

if TYPE_CHECKING:
    from agentrl.learner.memory import LearnerMemory


def describe_training(config: Config, folder: Path, critic: Path | None, use: Use = "policy") -> list[str]:
    """Return lines on what is trained of the policy in ``folder``, and with which learning rates.

    Raises:
        ConfigError: a key of ``learner`` does not fit the model.
        ModelError: the model's configuration cannot be loaded.

    """
    lines = [f"{'optimizer':<13}{describe_optimizer(config.learner.optimizer, folder, use)}"]
    if critic is not None:
        lines.append(f"{'critic':<13}{describe_optimizer(config.algo.critic.optimizer, critic, 'critic')}")
    if (lora := config.learner.lora) is not None:
        lines.append(f"{'trained':<13}LoRA adapters of rank {lora.rank} (learner.lora)")
    if config.learner.freeze:
        trained, total = count_trained(folder, config.learner.freeze)
        lines.append(f"{'trained':<13}{trained:,} of {total:,} weights (learner.freeze)")
    return lines


def describe_memory(config: Config, folder: Path) -> str:
    """Return a line on the memory that each rank of the learner needs to train the policy in ``folder``.

    Raises:
        ModelError: the model's configuration cannot be loaded.

    """
    found, device = estimate_memory(config, folder)
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in asdict(found).items() if size)
    ranks = config.learner.ranks
    return f"{'memory':<13}about {found.total / 2**30:.1f} GiB on each of {ranks} learner ranks ({device}): {parts}"


def estimate_memory(config: Config, folder: Path) -> tuple[LearnerMemory, str]:
    """Return the memory that each rank of the learner needs to train the policy in ``folder``, and its kind of device.

    Raises:
        ModelError: the model's configuration cannot be loaded.

    """
    from agentrl.learner.device import recomputed, resolve_device, uses_bfloat16
    from agentrl.learner.memory import learner_memory

    learner = config.learner
    # A configuration for GPUs is described as on GPUs, also on a machine without.
    device = "cuda" if learner.device == "cuda" else resolve_device(learner)
    on_gpu = device == "cuda"
    of_gpus: Recompute = "selective" if learner.recompute == "auto" else learner.recompute
    found = learner_memory(
        empty_model(folder, "sdpa"),
        learner,
        ranks=learner.ranks,
        tokens=config.batch.tokens_per_micro,
        bfloat16=learner.precision != "float32" if on_gpu else uses_bfloat16(learner),
        recompute=of_gpus if on_gpu else recomputed(learner),
        compiled=on_gpu if learner.compile == "auto" else learner.compile,
        reference=config.algo.has_kl,
    )
    return found, device
