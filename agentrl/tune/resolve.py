"""Configurations of trials, and why some are not worth one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl.algo.registry import algorithm_faults
from agentrl.cluster.placement_layout import check_placement
from agentrl.config.layers import Layer, load_layers
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.models.reference_policy import resolve_critic
from agentrl.planner.training_summary import KEEPS_GRADIENTS, estimate_memory, fit_to_gpu, memory_limit
from agentrl.tune.search import Settings
from agentrl.weight_sync.registry import transport_faults

ORIGIN = "agentrl tune"
_STEPS = 1_000_000
"""More than trials take: they end by themselves."""
_KEEP_MINUTES = 5.0
"""Between two runs; at the end the engines are ended."""
_RATE = 1e-12
"""Learning rate: the policy stays the same, and with it how long episodes are."""
_TRIAL: Tree = {
    "learner": {"optimizer": {"lr": _RATE}},
    "train": {"steps": _STEPS, "minutes": None, "eval_every": 0, "eval_first": False, "save_every": 0},
    "obs": {"progress": "plain", "wandb": "off", "trackio": False, "mlflow": None, "tensorboard": False},
}


def settings_tree(settings: Settings) -> Tree:
    """Return settings by full key as a tree."""
    tree: Tree = {}
    for key, value in settings.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = merge(tree, value)
    return tree


def resolver(layers: Sequence[Layer], model: Path, gpu_bytes: int | None) -> Callable[[Settings], Config]:
    """Return a function that returns the configuration of a trial of settings on top of ``layers``.

    It raises `UserError` for settings that are not valid, or whose learner needs more memory than a GPU has by the planner's
    estimate.

    Args:
        layers: the user's.
        model: folder of the policy.
        gpu_bytes: memory of a GPU; None without one.
    """
    base, trial = load_layers(layers), _TRIAL
    if not base.sampler.urls and base.weights.adapters != "only":
        trial = merge(trial, {"sampler": {"keep_minutes": _KEEP_MINUTES}})

    def resolve(settings: Settings) -> Config:
        trial_layers = [*layers, Layer(ORIGIN, settings_tree(settings)), Layer(ORIGIN, trial)]
        config = load_layers(trial_layers, [algorithm_faults, transport_faults])
        check_placement(config)
        config, _ = fit_to_gpu(config, model, lambda: gpu_bytes, critic=True)
        if gpu_bytes is not None and config.learner.device == "cuda" and config.learner.backend in KEEPS_GRADIENTS:
            check_memory(config, model, gpu_bytes)
        return config

    return resolve


def check_memory(config: Config, model: Path, gpu_bytes: int) -> None:
    """Check that the learner, with an engine on the same GPU that keeps its memory, fits a GPU by the planner's estimate.

    Raises:
        ConfigError: it does not.
    """
    learner = estimate_memory(config, model, resolve_critic(config.algo, model))[0].total
    limit, beside = memory_limit(config, gpu_bytes)
    if learner > limit:
        raise ConfigError(
            f"the learner would need about {learner / 2**30:.1f} GiB of {max(0.0, limit) / 2**30:.1f} GiB of a GPU{beside}"
        )
