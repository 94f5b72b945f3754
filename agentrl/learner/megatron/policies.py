"""The models of a rank: the policy or the critic that is trained, and the frozen reference policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.learner.base import Role
from agentrl.learner.device import compiles, uses_bfloat16
from agentrl.learner.megatron.fixes import apply_fixes
from agentrl.learner.megatron.layers import prepare_decoder
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import MegatronModel, build_model
from agentrl.learner.megatron.options import recomputed_layers
from agentrl.learner.megatron.pipeline import Pipeline
from agentrl.learner.megatron.training import Training
from agentrl.learner.megatron.weights import ModelWeights, load_weights
from agentrl.models.freezing import KEY as FREEZE_KEY
from agentrl.models.freezing import frozen_names
from agentrl.models.reference_policy import CRITIC_KEY, check_reference
from agentrl.models.reference_policy import KEY as REFERENCE_KEY


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's part of a model, with its weights."""

    model: MegatronModel
    weights: ModelWeights
    pipeline: Pipeline

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and buffers."""
        return [tensor for chunk in self.model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]


def start_groups(options: Mapping[str, Any], seed: int) -> None:
    """Prepare Megatron-Core, and create the process groups of the layout in ``options``, if there are none. Collective."""
    apply_fixes()
    if not parallel_state.model_parallel_is_initialized():
        Layout.from_options(options).start(seed)


def load_trained(
    folder: Path, config: LearnerConfig, options: Mapping[str, Any], device: torch.device, role: Role
) -> tuple[LoadedModel, Training]:
    """Load the model that is trained. Collective.

    Args:
        folder: a Hugging Face folder.
        config: of the learner.
        options: of `learner_options`.
        device: of the rank.
        role: a critic has a value head, one of zeros if the folder has none.

    Raises:
        ConfigError: see `build_model` and `frozen_names`.
        ModelError: the folder cannot be loaded.
    """
    is_critic = role == "critic"
    key = CRITIC_KEY if is_critic else "model.path"
    model, weights = _load(folder, config, options, device, key, values=is_critic)
    _freeze(weights, config)
    training = Training(model, config, options)
    pipeline = Pipeline(model, training.chunks, device, config.logits_chunk, compiles(config))
    return LoadedModel(model, weights, pipeline), training


def load_reference(
    folder: Path, config: LearnerConfig, options: Mapping[str, Any], device: torch.device, policy: Path
) -> LoadedModel:
    """Load the reference policy; see `load_trained`.

    Raises:
        ConfigError: its vocabulary is not the policy's.
    """
    check_reference(policy, folder)
    model, weights = _load(folder, config, options, device, REFERENCE_KEY)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return LoadedModel(model, weights, Pipeline(model, model.chunks, device, config.logits_chunk, compiles(config)))


def _load(
    folder: Path,
    config: LearnerConfig,
    options: Mapping[str, Any],
    device: torch.device,
    key: str,
    *,
    values: bool = False,
) -> tuple[MegatronModel, ModelWeights]:
    dtype = torch.bfloat16 if uses_bfloat16(config) else torch.float32
    model = build_model(folder, options, device=device, dtype=dtype, key=key, values=values)
    weights = ModelWeights(model)
    load_weights(weights, folder, key)
    for chunk in model.chunks:
        prepare_decoder(chunk.decoder.layers, compiled=compiles(config), recompute=recomputed_layers(config))
    return model, weights


def _freeze(weights: ModelWeights, config: LearnerConfig) -> None:
    """Mark the weights of `LearnerConfig.freeze`.

    Raises:
        ConfigError: a pattern matches only some of the weights that Megatron-Core has in one parameter.
    """
    if not config.freeze:
        return
    frozen = frozen_names([spec.name for spec in weights.specs()], config.freeze)
    for weight in weights.rank_weights:
        names = {weight_slice.tensor.name for weight_slice in weight.slices}
        if names & frozen and names - frozen:
            raise ConfigError(
                f"{FREEZE_KEY}={config.freeze}: {min(names & frozen)} is frozen and {min(names - frozen)} trained, but the "
                f"megatron learner has both in one parameter; freeze both or none"
            )
        weight.tensor.requires_grad_(weight.tensor.requires_grad and not names & frozen)


def copy_weights(policy: LoadedModel, reference: LoadedModel) -> None:
    """Make the reference a copy of the policy.

    Raises:
        LearnerError: their architectures differ.
    """
    if policy.weights.specs() != reference.weights.specs():
        raise LearnerError(
            "the reference has another architecture than the policy, so it cannot become the policy: set "
            "algo.reference_steps=0, or algo.reference to a model of the policy's architecture"
        )
    for target, source in zip(reference.weights.rank_weights, policy.weights.rank_weights, strict=True):
        target.tensor.copy_(source.tensor)
