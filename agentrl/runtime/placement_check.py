"""Whether engines and learner can be where ``placement.mode`` puts them, as far as that is known before any start."""

from __future__ import annotations

from agentrl.cluster.placement_layout import lay_out
from agentrl.cluster.ray_address import learner_device, running_address
from agentrl.config.placement import engine_ranks, sampler_device
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError


def check_placement(config: Config) -> None:
    """Refuse what cannot be placed. What a Ray that runs already can hold is known once the run has joined it.

    Raises:
        ConfigError: the keys do not fit each other.
        MissingError: there are too few GPUs here.

    """
    mode, ranks = config.placement.mode, config.learner.ranks
    if config.learner.device == "cuda" and running_address() is None and ranks > gpus_here():
        raise MissingError(
            f"learner.device=cuda with learner.ranks={ranks} wants as many GPUs; there are {gpus_here()} here"
        )
    if mode == "separate":
        return
    if config.sampler.urls:
        raise ConfigError(
            f"placement.mode={mode} with sampler.url={config.sampler.url}: engines that run already are where they are; "
            "leave out placement.mode, or sampler.url"
        )
    device = learner_device(config.learner)
    if mode == "colocate":
        _check_shared(config, device)
    gpus = lay_out(config, device).total.get("GPU", 0)
    if gpus > gpus_here() and running_address() is None:
        raise MissingError(
            f"placement.mode={mode} wants {gpus} GPUs for learner.ranks={ranks} and sampler.engines="
            f"{config.sampler.engines} of {engine_ranks(config.sampler)} each; there are {gpus_here()} here, and no Ray runs "
            "that has more (`ray start`, or RAY_ADDRESS)"
        )


def describe_placement(config: Config) -> str:
    """Return who gets how many GPUs, for people."""
    ranks, engines, each = config.learner.ranks, config.sampler.engines, engine_ranks(config.sampler)
    of_each = f"{engines} engine{'s' if engines > 1 else ''} of {each}"
    if config.placement.mode == "colocate":
        return f"colocate: {ranks} for the learner, in turns with {of_each}"
    return f"disaggregate: {ranks} for the learner, and {of_each}"


def _check_shared(config: Config, device: str) -> None:
    """Refuse engines that cannot have the learner's GPUs in turns."""
    sampler, ranks = config.sampler, config.learner.ranks
    each = engine_ranks(sampler)
    if sampler_device(sampler) != device:
        raise ConfigError(
            f"placement.mode=colocate: the learner is on {device}, the engines are on {sampler_device(sampler)}; set "
            "learner.device, or sampler.sglang.device, or placement.mode=separate"
        )
    if sampler.engines * each > ranks:
        raise ConfigError(
            f"placement.mode=colocate: sampler.engines={sampler.engines} of {each} GPUs each do not fit on those of "
            f"learner.ranks={ranks}; set sampler.engines={max(1, ranks // each)}"
            + (
                " and a smaller sampler.sglang.tp_size"
                if each > ranks
                else f", or learner.ranks={sampler.engines * each}"
            )
        )
    if config.weights.sync_every > 1:
        raise ConfigError(
            f"placement.mode=colocate with weights.sync_every={config.weights.sync_every}: engines that have released their "
            "memory need new weights after each step; leave out weights.sync_every"
        )
    if device == "cuda" and sampler.sglang_options.get("enable_memory_saver") is False:
        raise ConfigError(
            "placement.mode=colocate with sampler.sglang.enable_memory_saver=false: without it SGLang gives no memory back; "
            "leave it out"
        )


def gpus_here() -> int:
    """Return how many GPUs torch finds on this machine."""
    import torch

    return torch.cuda.device_count()
