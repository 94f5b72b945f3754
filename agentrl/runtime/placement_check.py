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
    mode, workers = config.placement.mode, config.learner.workers
    if config.learner.device == "cuda" and running_address() is None and workers > gpus_here():
        raise MissingError(
            f"learner.device=cuda with learner.workers={workers} wants as many GPUs; there are {gpus_here()} here"
        )
    if mode == "beside":
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
            f"placement.mode={mode} wants {gpus} GPUs for learner.workers={workers} and sampler.engines="
            f"{config.sampler.engines} of {engine_ranks(config.sampler)} each; there are {gpus_here()} here, and no Ray runs "
            "that has more (`ray start`, or RAY_ADDRESS)"
        )


def describe_placement(config: Config) -> str:
    """Return who gets how many GPUs, for people."""
    workers, engines, each = config.learner.workers, config.sampler.engines, engine_ranks(config.sampler)
    of_each = f"{engines} engine{'s' if engines > 1 else ''} of {each}"
    if config.placement.mode == "colocate":
        return f"colocate: {workers} for the learner, in turns with {of_each}"
    return f"disaggregate: {workers} for the learner, and {of_each}"


def _check_shared(config: Config, device: str) -> None:
    """Refuse engines that cannot have the learner's GPUs in turns."""
    sampler, workers = config.sampler, config.learner.workers
    each = engine_ranks(sampler)
    if sampler_device(sampler) != device:
        raise ConfigError(
            f"placement.mode=colocate: the learner is on {device}, the engines are on {sampler_device(sampler)}; set "
            "learner.device, or sampler.sglang.device, or placement.mode=beside"
        )
    if sampler.engines * each > workers:
        raise ConfigError(
            f"placement.mode=colocate: sampler.engines={sampler.engines} of {each} GPUs each do not fit on those of "
            f"learner.workers={workers}; set sampler.engines={max(1, workers // each)}"
            + (
                " and a smaller sampler.sglang.tp_size"
                if each > workers
                else f", or learner.workers={sampler.engines * each}"
            )
        )
    if config.weights.every > 1:
        raise ConfigError(
            f"placement.mode=colocate with weights.every={config.weights.every}: engines that have given their memory back "
            "need new weights after each step; leave out weights.every"
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
