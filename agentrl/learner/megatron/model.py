"""Megatron-Core models from Hugging Face folders: the chunks of this rank, without their weights' contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from agentrl.batch.microbatch import to_device
from agentrl.core.errors import ModelError
from agentrl.learner.attention import DividedRows, packed_rows
from agentrl.learner.context_parallel import Context
from agentrl.learner.megatron.experts import BiasedExperts, GroupedExperts, PairDispatcher, RoutedLayer, prepare_routing
from agentrl.learner.megatron.families.base import Family, head_size, layer_features
from agentrl.learner.megatron.families.registry import read_family
from agentrl.learner.megatron.fixes import apply_fixes
from agentrl.learner.megatron.images import ImageGPT, ImageModel
from agentrl.learner.megatron.layers import (
    LatentNorm,
    PackedAttention,
    PackedRotary,
    PackedTokens,
    PostNormLayer,
    RMSNorm,
    ValueHead,
    replace_linears,
)
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.options import transformer_config
from agentrl.learner.routing_replay import experts_by_layer


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A rank's part of a model."""

    chunks: tuple[Any, ...]
    """A ``GPTModel`` for each virtual stage."""
    config: TransformerConfig
    layout: Layout
    family: Family
    rotary: PackedRotary
    """Shared by all layers."""
    hf: Any
    """Configuration in transformers, of a model that reads images that of its text part."""
    images: ImageModel | None = None
    """Reads images; None if the model reads none."""
    values: bool = False
    """Whether it has a value head in place of the language head."""
    key: str = "model.path"
    """Configuration key of its folder, for messages."""

    @property
    def head_is_tied(self) -> bool:
        """Whether the head has the weight of the embedding."""
        return not self.values and bool(self.hf.tie_word_embeddings)


def build_model(
    folder: Path,
    options: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype,
    key: str = "model.path",
    values: bool = False,
) -> MegatronModel:
    """Build this rank's chunks; `load_weights` fills them. The groups of the layout exist (`Layout.start`).

    A rank allocates the memory of its own weights only.

    Args:
        folder: a Hugging Face folder.
        options: the options ``learner.megatron``.
        device: of the rank.
        dtype: of the parameters.
        key: configuration key of the folder, for messages.
        values: with a value head in place of the language head.

    Raises:
        ConfigError: an option is unknown, or Megatron-Core refuses it.
        ModelError: the folder has no model of a known family.
    """
    apply_fixes()
    family, hf = read_family(folder, key)
    images = ImageModel(folder, key) if family.reads_images else None
    layout = Layout.from_options(options)
    config = transformer_config(family.options(hf), options, device=device, dtype=dtype)
    rotary = _rotary(hf, config, device, f"{key}={folder}")
    chunks = []
    for stage in range(layout.chunks):
        number = stage if layout.virtual_pipeline_model_parallel_size else None
        is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number)
        chunk: Any = (ImageGPT if images is not None and is_first else GPTModel)(
            config,
            _decoder_spec(config, family, hf, number),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=is_first,
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not values,
            position_embedding_type="rope",
            vp_stage=number,
        )
        for module in chunk.modules():
            if hasattr(module, "rotary_pos_emb"):
                module.rotary_pos_emb = rotary
            if isinstance(module, MoELayer):
                prepare_routing(module)
                if _sends_pairs(config):
                    module.token_dispatcher = PairDispatcher(config, module.local_expert_indices)
        if values and chunk.post_process:
            chunk.output_layer = ValueHead(config)
        replace_linears(chunk.decoder.layers)
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_by_tokens)
        if images is not None and is_first:
            images.allocate(config, device)
            chunk.add_tower(images, layer_features(family))
        chunks.append(chunk.to(device))
    return MegatronModel(tuple(chunks), config, layout, family, rotary, hf, images, values, key)


def packed_tokens(
    model: MegatronModel,
    position_ids_L: torch.Tensor,
    row_L: torch.Tensor,
    device: torch.device,
    experts_L: torch.Tensor | None = None,
    loss_weight: float = 0.0,
    rotary_3_L: torch.Tensor | None = None,
) -> PackedTokens:
    """Return packed rows as layers read them: the argument ``packed_seq_params`` of a chunk.

    With context parallelism the chunk's other arguments have this rank's tokens only, those of `local_tokens`.

    Args:
        model: of this rank.
        position_ids_L: int64 on the CPU, from 0 in every row, of all tokens.
        row_L: int32 on the CPU, -1 in padding, of all tokens.
        device: of the rank.
        experts_L: recorded experts that routers use, as in `MicroBatch`; None if the routers choose.
        loss_weight: see `PackedTokens`.
        rotary_3_L: rotary positions on three axes on the CPU, of all tokens; None: ``position_ids_L`` on every axis.
    """
    dtype = model.config.params_dtype
    sinks = _windows(model) if model.family.sinks else None
    rows = packed_rows(position_ids_L, row_L, device, flash=dtype is torch.bfloat16, sinks=sinks)
    local = local_tokens(len(position_ids_L))
    positions = to_device(position_ids_L[local], device)
    context = rank_context()
    routed = _routed_tokens(local, model.config.sequence_parallel)
    experts = None if experts_L is None else experts_by_layer(experts_L, routed, device)
    rotary_positions = positions if rotary_3_L is None else to_device(rotary_3_L[:, local].contiguous(), device)
    divided = rows if context is None else DividedRows(rows, context)
    padding_L = row_L < 0
    tokens, all_tokens = (int((~padding).sum()) for padding in (padding_L[routed], padding_L))
    replicas = 1 if model.config.sequence_parallel else parallel_state.get_tensor_model_parallel_world_size()
    return PackedTokens(
        positions,
        divided,
        experts,
        model.rotary.cos_sin(rotary_positions, dtype),
        loss_weight,
        to_device(padding_L[routed], device),
        tokens / (max(1, all_tokens) * replicas),
    )


def _windows(model: MegatronModel) -> set[int]:
    """Return the sizes of the layers' sliding windows."""
    windows = (model.family.window(model.hf, layer) for layer in range(model.config.num_layers))
    return {window for window in windows if window is not None}


def embedded_tokens(model: MegatronModel, length: int) -> slice:
    """Return which of a micro-batch's tokens this rank embeds; with sequence parallelism a part of `local_tokens`."""
    return _routed_tokens(local_tokens(length), model.config.sequence_parallel)


def _routed_tokens(local: slice, sequence_parallel: bool) -> slice:
    """Return which of this rank's tokens its routers get."""
    group = parallel_state.get_tensor_model_parallel_group()
    if not sequence_parallel:
        return local
    count = (local.stop - local.start) // group.size()
    return slice(local.start + group.rank() * count, local.start + (group.rank() + 1) * count)


def local_tokens(length: int) -> slice:
    """Return which tokens of a micro-batch this rank computes; ranks of context parallelism divide ``length``."""
    context = rank_context()
    return slice(0, length) if context is None else context.token_slice(length)


def rank_context() -> Context | None:
    """Return the ranks of context parallelism; None without it."""
    group = parallel_state.get_context_parallel_group()
    return Context(group.group_name, group.size(), group.rank()) if group.size() > 1 else None


def _decoder_spec(config: TransformerConfig, family: Family, hf: Any, stage: int | None) -> TransformerBlockSubmodules:
    if config.pipeline_model_parallel_layout is not None:
        layers = config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=stage)
        layers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    return TransformerBlockSubmodules(
        layer_specs=[
            _layer_spec(config, family, has_experts(config, layer), family.window(hf, layer)) for layer in layers
        ],
        layer_norm=RMSNorm,
    )


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether the layer with this index is a mixture of experts."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])


def _sends_pairs(config: TransformerConfig) -> bool:
    """Return whether `PairDispatcher` can exchange the tokens: all-to-all, no limit of an expert's tokens, no overlap."""
    return (
        config.moe_token_dispatcher_type == "alltoall"
        and config.moe_expert_capacity_factor is None
        and not config.moe_shared_expert_overlap
    )


def _layer_spec(config: TransformerConfig, family: Family, experts: bool, window: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if experts:
        layer.mlp.submodules.experts = GroupedExperts if family.stacked is None else BiasedExperts
        spec.module = RoutedLayer
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = ModuleSpec(PackedAttention, params={"window": window, "has_sinks": family.sinks})
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if family.post_norms:
        spec.module = PostNormLayer
    return spec


def _by_tokens(embedding: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Return embeddings ``[L, 1, H]`` with the strides of layers' outputs, so that the first layer has their compiled code."""
    return output.flatten(0, 1)[:, None]


def _rotary(hf: Any, config: TransformerConfig, device: torch.device, setting: str) -> PackedRotary:
    """Return the rotary embedding, with the frequencies that transformers computes."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf.rope_parameters
    kind, fraction = parameters["rope_type"], parameters.get("partial_rotary_factor", 1.0)
    size, scaling = int(head_size(hf) * fraction), 1.0
    if kind == "default":
        inv_freq = 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    elif kind in ("linear", "llama3", "yarn"):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    else:
        raise ModelError(f"{setting}: rope_type={kind!r} in config.json: the megatron learner lacks it")
    if scaling != 1 and not config.multi_latent_attention:
        if fraction != 1:
            raise ModelError(f"{setting}: rope_type={kind!r} with partial_rotary_factor={fraction} in config.json")
        # Of queries and keys alike: their product has the square.
        config.softmax_scale = scaling**2 * head_size(hf) ** -0.5
    axes = None
    if sections := parameters.get("mrope_section"):
        axes = rotary_axes(sections, interleaved=parameters.get("mrope_interleaved", False)).to(device)
    return PackedRotary(inv_freq.to(device), scaling, config.rotary_interleaved, config.multi_latent_attention, axes)


def rotary_axes(sections: Sequence[int], *, interleaved: bool) -> torch.Tensor:
    """Return the axis of each rotary frequency: int64 of 0 (time), 1 (height) and 2 (width).

    Args:
        sections: ``mrope_section``, the number of frequencies of each axis.
        interleaved: whether the axes alternate (Qwen3-VL), until those of height and of width are all taken.
    """
    if not interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(sum(sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes
