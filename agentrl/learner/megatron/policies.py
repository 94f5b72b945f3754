"""The models of a rank and their training: the policy or the critic that is trained, and the frozen reference policy.

Gradients are not divided: the weights of tokens include all denominators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import nn

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.learner.base import Role
from agentrl.learner.device import compiles, uses_bfloat16
from agentrl.learner.layers import prepare_layers, vision_blocks
from agentrl.learner.megatron.fixes import apply_fixes
from agentrl.learner.megatron.layers import prepare_decoder
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import MegatronModel, build_model
from agentrl.learner.megatron.options import data_parallel_config, optimizer_config, recomputed_layers
from agentrl.learner.megatron.pipeline import Pipeline
from agentrl.learner.megatron.weights import ModelWeights, load_weights
from agentrl.learner.optimizer_states import OptimizerStates
from agentrl.learner.rank import learning_rate
from agentrl.models.freezing import KEY as FREEZE_KEY
from agentrl.models.freezing import frozen_names, matching_names
from agentrl.models.reference_policy import CRITIC_KEY, check_reference
from agentrl.models.reference_policy import KEY as REFERENCE_KEY


class OptimizerShard(NamedTuple):
    """Consecutive numbers of a weight that this rank's optimizer changes."""

    parameter: torch.Tensor
    """The weight."""
    start: int
    """Position of the first one in the flattened weight."""
    weight: torch.Tensor
    """The numbers in float32."""
    moments: dict[str, torch.Tensor]
    """What the optimizer remembers of each, by name, such as ``exp_avg``; empty before the first step."""


class Training:
    """Gradients and optimizer of a model, whose parameters move into Megatron-Core's buffers.

    Args:
        model: this rank's part, with its weights.
        config: of the learner, with its optimizer without ``auto``.
        options: the options ``learner.megatron``.

    Raises:
        ConfigError: see `select_options`.
    """

    def __init__(self, model: MegatronModel, config: LearnerConfig, options: Mapping[str, Any]) -> None:
        self.config = config.optimizer
        dtype = model.config.params_dtype
        ddp = data_parallel_config(options)
        self.chunks = [
            DistributedDataParallel(model.config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(model.chunks)
        ]
        if ddp.overlap_param_gather:
            for chunk in self.chunks:
                _wait_before_layers(chunk)
        if ddp.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in self.chunks]
            model.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        self.optimizer: Any = get_megatron_optimizer(optimizer_config(config.optimizer, options, dtype), self.chunks)
        for group in self._groups():
            group["fused"] = True
        inner = [optimizer.optimizer for optimizer in self._optimizers()]
        self.states = OptimizerStates(inner, offloaded=config.cpu_offload == "optimizer")
        if self.states.offloaded:
            for optimizer in inner:
                optimizer.step = partial(self.states.step_by_chunks, optimizer, optimizer.step)

    def _optimizers(self) -> list[Any]:
        """Return Megatron-Core's optimizers, for experts a separate one; those without a parameter are left out."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [optimizer for optimizer in optimizers if optimizer.optimizer is not None]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters of torch's optimizers."""
        return [group for optimizer in self._optimizers() for group in optimizer.optimizer.param_groups]

    def shards(self) -> Iterator[OptimizerShard]:
        """Iterate over what this rank's optimizers change."""
        for optimizer in self._optimizers():
            parameters = _parameters(optimizer)
            for group in optimizer.optimizer.param_groups:
                for weight in group["params"]:
                    parameter, start = parameters[weight]
                    state = optimizer.optimizer.state.get(weight, {})
                    moments = {name: moment for name, moment in state.items() if _is_moment(moment)}
                    yield OptimizerShard(parameter, start, weight.detach(), moments)

    def tensors(self) -> list[torch.Tensor]:
        """Return float32 weights, and moments that are not in CPU memory already."""
        tensors = [tensor for shard in self.shards() for tensor in (shard.weight, *shard.moments.values())]
        return [tensor for tensor in tensors if not self.states.holds(tensor)]

    def allocate_moments(self, names: Sequence[str], step: int) -> None:
        """Give each shard moments of these names, and the number of finished steps; without names, what a new optimizer has."""
        for optimizer in self._optimizers():
            inner = optimizer.optimizer
            for group in inner.param_groups:
                for weight in group["params"]:
                    if not names:
                        inner.state.pop(weight, None)
                        continue
                    state = inner.state.setdefault(weight, {})
                    device = weight.device if group.get("fused") or group.get("capturable") else "cpu"
                    state["step"] = torch.tensor(float(step), device=device)
                    for name in names:
                        if name not in state:
                            state[name] = torch.zeros_like(weight, requires_grad=False)

    def complete_weights(self) -> None:
        """Get the weights that other data-parallel ranks have updated, if that waits for the next pass. Collective."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _gradients(self) -> list[torch.Tensor]:
        return [
            buffer.grad_data for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def release_gradients(self) -> None:
        """Free the memory of gradients, which are zeros between steps."""
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(0)

    def restore_gradients(self) -> None:
        """Allocate the memory of gradients."""
        for gradients in self._gradients():
            gradients.untyped_storage().resize_(gradients.nbytes)
            gradients.zero_()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Have all states on the device in the block, which loads them."""
        self.states.restore()
        yield
        if self.states.offloaded:
            self.states.offload()

    def begin_pass(self, *, completes: bool) -> None:
        """Choose whether the next pass ends with the reduction of gradients over ranks: only the last pass of an optimizer step.

        Until then each rank has separate gradients: reduced ones must not be reduced again.
        """
        for chunk in self.chunks:
            chunk.config.finalize_model_grads_func = _finalize if completes else None

    def scale_gradient(self, factor: float) -> None:
        """Multiply the gradient."""
        if factor != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(factor)

    def zero_grad(self) -> None:
        """Set gradients to zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def update(self, step: int, lr_scale: float) -> dict[str, float]:
        """Clip the gradient and take an optimizer step; none if the gradient is not finite. Collective."""
        rate = learning_rate(self.config, step, lr_scale)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            return {"train/nonfinite_gradients": 1.0, "train/lr": rate}
        for group in self._groups():
            group["lr"] = rate
        for optimizer in self._optimizers():
            clip_grad_by_total_norm_fp32(optimizer.get_parameters(), self.config.max_grad_norm, norm)
        self.optimizer.step_with_ready_grads()
        return {"train/nonfinite_gradients": 0.0, "train/grad_norm": norm, "train/lr": rate}


def _parameters(optimizer: Any) -> dict[torch.Tensor, tuple[torch.Tensor, int]]:
    """Return the parameter of each weight of a torch optimizer, and the position of the weight's first number in it."""
    groups = optimizer.optimizer.param_groups
    if isinstance(optimizer, DistributedOptimizer):
        return {
            groups[group]["params"][order]: (parameter, optimizer._get_model_param_range_map(parameter)["param"].start)
            for parameter, (group, order) in optimizer.model_param_group_index_map.items()
        }
    copies = getattr(optimizer, "fp32_from_float16_groups", [])
    parameters = dict(zip(chain(*copies), chain(*getattr(optimizer, "float16_groups", [])), strict=True))
    return {weight: (parameters.get(weight, weight), 0) for group in groups for weight in group["params"]}


def _is_moment(value: object) -> bool:
    """Return whether a value of an optimizer's state is of each number of a weight, as opposed to a count of steps."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _wait_before_layers(chunk: Any) -> None:
    """Wait for all weights of a decoder layer before the layer: compiled code calls no hooks within it."""
    for layer in chunk.module.decoder.layers:
        modules, wait = [*layer.modules()], chunk._make_forward_pre_hook()
        for module in modules:
            chunk.remove_forward_pre_hook_handles.pop(module).remove()

        def wait_for_all(layer: nn.Module, inputs: object, modules: Any = modules, wait: Any = wait) -> None:
            for module in modules:
                wait(module)

        chunk.remove_forward_pre_hook_handles[layer] = layer.register_forward_pre_hook(wait_for_all)


def _finalize(chunks: list[Any], tokens: torch.Tensor | None, **options: Any) -> None:
    """Add up gradients over ranks, without Megatron-Core's division by a number of tokens."""
    finalize_model_grads(chunks, None, **options)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's part of a model, with its weights."""

    model: MegatronModel
    weights: ModelWeights
    pipeline: Pipeline

    def tensors(self) -> list[torch.Tensor]:
        """Return parameters and buffers."""
        return [tensor for chunk in self.model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]


def start_groups(options: Mapping[str, Any], seed: int, timeout_s: float) -> None:
    """Prepare Megatron-Core, and create the process groups of the layout in ``options``, if there are none. Collective.

    Args:
        options: of `learner_options`.
        seed: see `Layout.start`.
        timeout_s: see `Layout.start`.
    """
    apply_fixes()
    if not parallel_state.model_parallel_is_initialized():
        Layout.from_options(options).start(seed, timeout_s)


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
    folder: Path,
    config: LearnerConfig,
    options: Mapping[str, Any],
    device: torch.device,
    policy: Path,
    *,
    trust_remote_code: bool,
) -> LoadedModel:
    """Load the reference policy; see `load_trained`.

    Raises:
        ConfigError: its vocabulary is not the policy's.
    """
    check_reference(policy, folder, trust_remote_code=trust_remote_code)
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
    if model.images is not None:
        prepare_layers(vision_blocks(model.images.hf), compiled=False, recompute=recomputed_layers(config))
    return model, weights


def _freeze(weights: ModelWeights, config: LearnerConfig) -> None:
    """Mark the weights of `LearnerConfig.freeze`, of a critic those that read images.

    Raises:
        ConfigError: a pattern matches only some of the weights that Megatron-Core has in one parameter.
    """
    if not config.freeze:
        return
    images = weights.model.images
    module_names = {
        spec.name: spec.name if images is None else images.module_name(spec.name) for spec in weights.specs()
    }
    if weights.model.values:
        image_weights = [] if images is None else [name for name, _ in images.hf.named_parameters()]
        frozen_modules = matching_names(image_weights, config.freeze)
    else:
        frozen_modules = frozen_names(module_names.values(), config.freeze)
    frozen = {name for name, module_name in module_names.items() if module_name in frozen_modules}
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
