"""Estimate of the memory that a rank of the Megatron-Core learner needs, from a model's configuration and a layout.

Weights are divided by tensor parallelism, layers by pipeline parallelism, experts by expert parallelism. Gradients are float32
and whole on each rank; the distributed optimizer divides float32 weights and moments among data- and context-parallel ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.learner import Recompute
from agentrl.core.errors import ConfigError
from agentrl.learner.layer_memory import tower_bytes
from agentrl.learner.layers import vision_tower
from agentrl.learner.megatron.families.base import Family, Options, Weight, model_weights
from agentrl.learner.megatron.layout import RECOMPUTE, Layout
from agentrl.learner.memory import LearnerMemory, MemoryOptions
from agentrl.models.freezing import frozen_names, matching_names

_FLOAT32 = 4
_LOGITS = 2
"""Arrays as large as a chunk's logits that exist at the same time: the logits and their gradient."""
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_UNSUPPORTED = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Options for the layers of stages that `stage_layers` does not support."""


@dataclass(frozen=True, slots=True)
class MegatronWork:
    """Inputs of the memory estimate besides model and options."""

    ranks: int
    """``learner.ranks``."""
    tokens: int
    """Tokens of a micro-batch, over all context-parallel ranks."""
    logits_chunk: int
    """Tokens whose logits are held at the same time."""
    bfloat16: bool = True
    """Whether weights and products are bfloat16, with float32 weights in the optimizer; else all is float32."""
    reference: bool = False
    """Whether there is a reference policy."""
    recompute: Recompute = "none"
    """What is computed again in the backward pass, unless an option has Megatron-Core do it."""
    values: bool = False
    """Whether it is a critic, with a value head in place of the language head."""
    offloads: bool = False
    """Whether moments are in CPU memory (``learner.cpu_offload``)."""
    freeze: tuple[str, ...] = ()
    """Patterns of ``learner.freeze``: a frozen vision tower keeps no activations."""

    @property
    def size(self) -> int:
        """Bytes of a weight, and of an activation."""
        return 2 if self.bfloat16 else _FLOAT32


def megatron_memory(family: Family, hf: Any, options: Mapping[str, Any], work: MegatronWork) -> LearnerMemory:
    """Return the memory of a rank of the pipeline stage that needs most. Tokens are routed to experts evenly.

    Raises:
        ConfigError: the layout does not divide the model or the ranks, or an option is not supported here.
    """
    layout, model = Layout.from_options(options), family.options(hf)
    layout.check(model | {"vocab_size": hf.vocab_size}, options, work.ranks)
    stages = stage_layers(model["num_layers"], layout, options)
    stage_memories = (_stage(family, hf, model, options, work, stages, stage) for stage in range(len(stages)))
    return max(stage_memories, key=lambda memory: memory.total)


def stage_layers(layers: int, layout: Layout, options: Mapping[str, Any]) -> list[list[int]]:
    """Return the indices of the layers of each pipeline stage, over its virtual stages.

    Raises:
        ConfigError: an option gives the stages their layers in a way that is not supported here.
    """
    for name in _UNSUPPORTED:
        if options.get(name):
            raise ConfigError(
                f"learner.megatron.{name}: the memory of its stages is not estimated; leave it out to plan"
            )
    stages, chunks = layout.pipeline_model_parallel_size, layout.chunks
    fixed_sizes = {stage: int(options[name]) for stage, name in ((0, _FIRST), (stages - 1, _LAST)) if options.get(name)}
    even_size = (layers - sum(fixed_sizes.values())) // max(1, stages - len(fixed_sizes))
    sizes = [fixed_sizes.get(stage, even_size) for stage in range(stages)]
    if sum(sizes) != layers or min(sizes) < 1:
        raise ConfigError(
            f"learner.megatron: {stages} pipeline stages have {', '.join(map(str, sizes))} layers, and the model {layers}; "
            f"set {_FIRST} or {_LAST}"
        )
    chunk_sizes = [size // chunks for _ in range(chunks) for size in sizes]  # a stage's chunks are not neighbours
    starts = [sum(chunk_sizes[:index]) for index in range(len(chunk_sizes))]
    chunk_layers = [list(range(start, start + size)) for start, size in zip(starts, chunk_sizes, strict=True)]
    return [[layer for chunk in range(chunks) for layer in chunk_layers[chunk * stages + s]] for s in range(stages)]


def _stage(
    family: Family,
    hf: Any,
    model: Options,
    options: Mapping[str, Any],
    work: MegatronWork,
    stages: Sequence[Sequence[int]],
    stage: int,
) -> LearnerMemory:
    layout = Layout.from_options(options)
    is_first, is_last = stage == 0, stage == len(stages) - 1
    embedding, *norm_and_head = model_weights(hf, values=work.values)
    outer = [embedding] * is_first + norm_and_head * is_last
    if is_first and is_last and hf.tie_word_embeddings and not work.values:
        outer.pop()
    tensor = layout.tensor_model_parallel_size
    # Layers differ in whether they have experts, and in nothing else: one of each kind is counted.
    kinds = {_has_experts(model, layer): layer for layer in stages[stage]}
    count = Counter(_has_experts(model, layer) for layer in stages[stage])
    dense = sum(count[kind] * _numbers(family.layer(hf, layer), tensor) for kind, layer in kinds.items())
    tower_numbers, tower_activations = _tower(family, work) if is_first else (0, 0)
    dense += _numbers(outer, tensor) + tower_numbers
    experts = count[True] * _experts(family, hf, model, layout, kinds[True]) if True in kinds else 0
    per_number = (0 if work.offloads else 2 * _FLOAT32) + (_FLOAT32 if work.bfloat16 else 0)
    is_sharded = bool(options.get("use_distributed_optimizer", True))
    optimizer_ranks = work.ranks // (tensor * len(stages)) if is_sharded else 1
    expert_ranks = layout.expert_tensor_size * layout.expert_model_parallel_size * len(stages)
    expert_optimizer_ranks = work.ranks // expert_ranks if is_sharded else 1
    tokens = math.ceil(work.tokens / layout.context_parallel_size)
    weights = work.size * (dense + experts)
    outputs = 1 if work.values else hf.vocab_size // tensor
    activations = _activation_numbers(model, options, stages[stage], in_flight(layout, stage), work.recompute)
    return LearnerMemory(
        weights=weights,
        gradients=_FLOAT32 * (dense + experts),
        optimizer=per_number * (math.ceil(dense / optimizer_ranks) + math.ceil(experts / expert_optimizer_ranks)),
        reference=weights if work.reference else 0,
        activations=work.size * tokens * activations + math.ceil(in_flight(layout, stage) * tower_activations),
        logits=_LOGITS * _FLOAT32 * min(work.logits_chunk, tokens) * outputs if is_last else 0,
    )


def _tower(family: Family, work: MegatronWork) -> tuple[int, int]:
    """Return the numbers of the vision tower, and the bytes of its activations of a micro-batch; zeros without a tower.

    Each rank of the first stage has it as a whole and computes all images of a micro-batch, as if all tokens stood for images.
    """
    if family.whole is None:
        return 0, 0
    import torch
    from transformers import AutoModelForImageTextToText

    auto: Any = AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto.from_config(family.whole)
    weights, tower = dict(model.named_parameters()), vision_tower(model)
    assert tower is not None, "its family reads images"
    for name in (matching_names if work.values else frozen_names)(weights, work.freeze):
        weights[name].requires_grad_(False)
    options = MemoryOptions(work.ranks, work.tokens, work.bfloat16, recompute="none", compiled=False)
    activations, _ = tower_bytes(model, options)
    return sum(parameter.numel() for parameter in tower.parameters()), activations


def in_flight(layout: Layout, stage: int) -> float:
    """Return how often a stage keeps the activations of all of its layers at the same time, with enough micro-batches.

    One forward, one backward: as many micro-batches as there are stages from this one on. Interleaved, the warm-up has
    ``2 (p - 1 - stage) + (v - 1) p`` passes through one of ``v`` chunks, and one more is computed (arXiv:2104.04473, 2.2).
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.chunks
    if chunks == 1:
        return stages - stage
    return (2 * (stages - 1 - stage) + (chunks - 1) * stages + 1) / chunks


def _numbers(weights: Iterable[Weight], ranks: int) -> int:
    """Return how many numbers of the weights one of ``ranks`` tensor-parallel ranks has."""
    count = 0
    for weight in weights:
        numbers = sum((stop - start) * math.prod(t.shape[1:]) for block in weight.blocks for t, start, stop in block)
        count += numbers // ranks if weight.split else numbers
    return count


def _experts(family: Family, hf: Any, model: Options, layout: Layout, layer: int) -> int:
    """Return how many numbers of a layer's experts a rank has."""
    if family.stacked is not None:
        numbers = sum(math.prod(weight.tensor.shape) for weight in family.stacked(hf, layer))
        return numbers // layout.expert_model_parallel_size
    assert family.expert is not None
    expert_numbers = _numbers(family.expert(hf, layer, 0), layout.expert_tensor_size)
    return expert_numbers * int(model["num_moe_experts"]) // layout.expert_model_parallel_size


def _has_experts(model: Options, layer: int) -> bool:
    return bool(model.get("num_moe_experts")) and bool(model["moe_layer_freq"][layer])


def _activation_numbers(
    model: Options, options: Mapping[str, Any], layers: Sequence[int], times: float, recompute: Recompute
) -> int:
    """Return how many numbers of each token a stage keeps until the backward pass, and the layer in the backward pass has."""
    together = 1
    if RECOMPUTE in options:
        recompute = "full" if options[RECOMPUTE] == "full" else "none"
        together = int(options.get("recompute_num_layers") or 1)
    count = Counter(_has_experts(model, layer) for layer in layers)
    widths = {kind: _widths(model, options, kind) for kind in count}
    widest = max(widths.values(), key=lambda width: width.all)
    if recompute == "full":
        inputs = math.ceil(len(layers) / together) * widest.input
        return math.ceil(times * inputs) + together * widest.all + widest.gradients
    if recompute == "selective":
        products = math.ceil(times * sum(count[kind] * widths[kind].products for kind in count))
        return products + widest.all - widest.products + widest.gradients
    return math.ceil(times * sum(count[kind] * widths[kind].all for kind in count)) + widest.gradients


@dataclass(frozen=True, slots=True)
class _Widths:
    """Numbers of a layer for each token of a context-parallel rank."""

    input: int
    all: int
    """Kept if nothing is computed again."""
    products: int
    """Kept if all but products and attention is computed again: the layer's input and their results."""
    gradients: int
    """Gradients that its backward pass has at the same time: the hidden states', and the widest products'."""


def _widths(model: Options, options: Mapping[str, Any], experts: bool) -> _Widths:
    """Return the widths of a layer, of its products, norms, rotations and activations.

    Products keep their input, and so do norms. With sequence parallelism the activations between tensor-parallel products
    are divided among ranks; without it each rank has all of them.
    """
    layout = Layout.from_options(options)
    tensor = layout.tensor_model_parallel_size
    hidden = model["hidden_size"] // (tensor if options.get("sequence_parallel") else 1)
    attention, products = _mla_numbers(model) if model.get("multi_latent_attention") else _gqa_numbers(model)
    attention, products = attention // tensor, products // tensor
    # Both norms keep their input, and the products after them keep the norms' output.
    norms = 4 * hidden
    # The last product of attention is added to the input, and the norm of the sum depends on it.
    widths = _Widths(hidden, norms + attention, 2 * hidden + products, 0)
    middles = {"ffn_hidden_size": 1.0 / tensor}
    if experts:
        # A rank's experts get as many tokens as it has, times the experts of a token.
        rows = model["moe_router_topk"] * layout.expert_tensor_size / tensor
        routed = 2 * rows * model["hidden_size"] + 2 * model["num_moe_experts"] * hidden / model["hidden_size"]
        # Of the experts, and of the norm before them, nothing is computed again.
        products = widths.products + 2 * hidden + math.ceil(routed)
        widths = replace(widths, all=widths.all + math.ceil(routed), products=products)
        middles = {"moe_ffn_hidden_size": rows / layout.expert_tensor_size}
        if model.get("moe_shared_expert_intermediate_size"):
            middles["moe_shared_expert_intermediate_size"] = 1.0 / tensor
    middle = math.ceil(sum(model[name] * factor for name, factor in middles.items()))
    # Gate and up projections, and their product.
    widths = replace(widths, all=widths.all + 3 * middle, products=widths.products + (3 if experts else 2) * middle)
    return replace(widths, gradients=2 * hidden + 3 * middle)


def _gqa_numbers(model: Options) -> tuple[int, int]:
    """Return how many numbers of a token grouped-query attention keeps, and how many of them are of products and the result.

    It keeps queries, keys and values; queries and keys after norm and rotation; the result.
    """
    size = int(model["kv_channels"])
    queries, groups = int(model["num_attention_heads"]) * size, int(model["num_query_groups"]) * size
    normalized = queries + groups if model.get("qk_layernorm") else 0
    products = (queries + 2 * groups) + queries
    return products + normalized + (queries + groups), products


def _mla_numbers(model: Options) -> tuple[int, int]:
    """Return how many numbers of a token multi-head latent attention keeps, and how many of them are of products and the result.

    It keeps latents, before and after their norm; their projections, before and after rotation; the result.
    """
    names = ("num_attention_heads", "qk_pos_emb_head_dim", "qk_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    heads, rope, plain, values, latent, query_latent = (int(model[name] or 0) for name in names)
    projected, rotated = (plain + rope) + (plain + values), 2 * (plain + rope)
    products = query_latent + latent + rope + heads * (projected + values)
    return products + query_latent + latent + heads * rotated, products
