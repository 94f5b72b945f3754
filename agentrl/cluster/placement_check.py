"""Checks before any start whether the GPUs of this machine, or of a running Ray, are enough for ``placement.mode``."""

from __future__ import annotations

from agentrl.algo.registry import needs_critic
from agentrl.cluster.placement_layout import lay_out
from agentrl.cluster.ray_address import learner_device, running_address
from agentrl.config.engine_checks import check_placement as check_placement_keys
from agentrl.config.schema import Config
from agentrl.core.errors import MissingError


def check_placement(config: Config) -> None:
    """Check the placement. What a running Ray can hold is known only after the run has joined it.

    Raises:
        ConfigError: `agentrl.config.engine_checks.check_placement`.
        MissingError: there are too few GPUs here.
    """
    mode, ranks = config.placement.mode, config.learner.ranks
    has_critic_gpus = needs_critic(config.algo) and mode != "colocate"
    required_gpus = 2 * ranks if has_critic_gpus else ranks
    if config.learner.device == "cuda" and running_address() is None and required_gpus > gpus_here():
        critic = " for the policy and as many for its critic" if has_critic_gpus else ""
        raise MissingError(
            f"learner.device=cuda with learner.ranks={ranks} wants as many GPUs{critic}; there are {gpus_here()} here"
        )
    if mode == "separate":
        return
    device = learner_device(config.learner)
    check_placement_keys(config, device)
    gpus = lay_out(config, device).total.get("GPU", 0)
    if gpus > gpus_here() and running_address() is None:
        learner = f"learner.ranks={ranks}{' and its critic' if has_critic_gpus else ''}"
        raise MissingError(
            f"placement.mode={mode} wants {gpus} GPUs for {learner} and sampler.engines={config.sampler.engines} of "
            f"{config.sampler.engine_ranks} each; there are {gpus_here()} here, and no Ray runs that has more (`ray start`, or "
            "RAY_ADDRESS)"
        )


def describe_placement(config: Config) -> str:
    """Return in one line how many GPUs the learner and the engines use."""
    ranks, engines, engine_ranks = config.learner.ranks, config.sampler.engines, config.sampler.engine_ranks
    engine_text = f"{engines} engine{'s' if engines > 1 else ''} of {engine_ranks}"
    if config.placement.shares_gpus:
        critic = " and its critic" if needs_critic(config.algo) else ""
        return f"colocate: {ranks} for the learner{critic}, in turns with {engine_text}"
    critic = f", {ranks} for its critic" if needs_critic(config.algo) else ""
    return f"disaggregate: {ranks} for the learner{critic}, and {engine_text}"


def gpus_here() -> int:
    """Return how many GPUs torch finds on this machine."""
    import torch

    return torch.cuda.device_count()
