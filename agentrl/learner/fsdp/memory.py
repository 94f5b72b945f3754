"""Estimate of the memory that an FSDP rank needs, from a model without weights.

The peak is that of the moment of an optimizer step that needs most. Before the backward pass all activations are there, and
the gradients of earlier micro-batches. In the backward pass gradients appear while activations are freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp.adamw_8bit import moment_bytes
from agentrl.learner.fsdp.compute_copies import copied_layers, copies_weights
from agentrl.learner.fsdp.experts import expert_modules
from agentrl.learner.fsdp.optimizer import is_vector
from agentrl.learner.layer_memory import LayerWidths, backward_bytes, saved_bytes, tower_bytes, trained_count
from agentrl.learner.layers import decoder_layers, vision_blocks
from agentrl.learner.memory import FLOAT32, LearnerMemory, MemoryOptions
from agentrl.learner.optimizer_states import CHUNK_BYTES
from agentrl.models.load import value_head

_LOGITS, _LOGITS_EAGER = 2, 5
"""Arrays of a chunk's logits at the same time: with compilation they and their gradient, else intermediate results too."""


@dataclass(frozen=True, slots=True)
class _Weight:
    """Shape of a parameter, and whether it is trained. To read both of a parameter takes longer than to compute with them."""

    shape: tuple[int, ...]
    count: int
    """Numbers."""
    trained: bool
    is_vector: bool
    """See `agentrl.learner.fsdp.optimizer.is_vector`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """What the memory of a decoder layer depends on; equal layers of a model are the same object."""

    weights: tuple[_Weight, ...]
    linears: tuple[tuple[int, int], ...]
    """Sizes of inputs and outputs."""
    expert_count: int
    """Numbers of all fused experts; 0 without."""
    copied: int
    """Numbers of weights that may have copies (`copied_layers`)."""

    @property
    def count(self) -> int:
        """Numbers of all weights."""
        return _count(self.weights)


class FsdpMemory:
    """Estimates memory of one model, which is read once: to go through its modules takes longer than an estimate.

    Args:
        hf: a model of transformers, such as `agentrl.models.load.empty_model` returns; its weights are not read. With a
            value head it is a critic. Those without ``requires_grad`` are not trained.
    """

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self.weights = _read_weights(hf)
        layers = dict[tuple[object, ...], _Layer]()
        self.layers = [_read_layer(layer, layers) for layer in decoder_layers(hf)]
        self.blocks = [_read_weights(block) for block in vision_blocks(hf)]

    def __call__(self, config: LearnerConfig, options: MemoryOptions) -> LearnerMemory:
        """Return the memory of one rank at the moment of an optimizer step that needs most.

        Args:
            config: optimizer, sharding and chunk of logits.
            options: ranks, tokens and precision.
        """
        return max(_moments(self, config, options), key=lambda moment: moment.total)


def _read_weights(module: nn.Module) -> tuple[_Weight, ...]:
    named = module.named_parameters()
    return tuple(_Weight(tuple(p.shape), p.numel(), p.requires_grad, is_vector(name, p)) for name, p in named)


def _read_layer(layer: nn.Module, known_layers: dict[tuple[object, ...], _Layer]) -> _Layer:
    """Return what is known of a layer; equal layers share the object."""
    weights = _read_weights(layer)
    linears = tuple((m.in_features, m.out_features) for m in layer.modules() if isinstance(m, nn.Linear))
    expert_count = sum(_count(_read_weights(module)) for module in expert_modules(layer))
    copied = sum(linear.weight.numel() for linear in copied_layers([layer]))
    key = (weights, linears, expert_count, copied)
    return known_layers.setdefault(key, _Layer(weights, linears, expert_count, copied))


def _moments(model: FsdpMemory, config: LearnerConfig, options: MemoryOptions) -> Iterator[LearnerMemory]:
    """Yield the memory at the head, at each layer of the backward pass, at the embeddings, the last of it, and in the update."""
    size, several, tokens, hf = options.size, options.ranks > 1, options.tokens, model.hf
    layers, blocks = model.layers, model.blocks
    whole_units = [layer.count for layer in layers]
    block_units = [_count(block) for block in blocks]
    outer = _count(model.weights) - sum(whole_units) - sum(block_units)
    units = [unit - _others_experts(layer, config) for layer, unit in zip(layers, whole_units, strict=True)]
    shards, adapters = (
        _shards(model.weights, options.shards, trained=False),
        sum(_adapters(layer, config, options) for layer in layers),
    )
    trained = _shards(model.weights, options.shards, trained=True) + adapters
    states = _optimizer(model, config, options.shards) + 2 * adapters
    state = {"weights": shards + adapters, "optimizer": 0 if config.cpu_offload == "optimizer" else states}
    state |= {"reference": shards if options.reference else 0}
    has_copies = copies_weights(
        config, options.recompute, ranks=options.ranks, bfloat16=options.bfloat16, compiled=options.compiled
    )
    copied = [layer.copied if has_copies else 0 for layer in layers]
    state["copies"] = size * sum(copied)
    # Autograd adds up the gradients of tied embeddings and head before it adds them to that of the weight. FSDP reduces the
    # gradient of a unit: there are a whole one, and its float32 copy.
    head = _output(hf)
    tied = hf.get_input_embeddings().weight is head.weight
    embedding_gradient = FLOAT32 * trained_count(hf.get_input_embeddings().parameters()) if not several else 0
    reduced = (size + FLOAT32) if several else 0
    # Sums in bfloat16 take the gradient of each weight at once.
    rounded = config.optimizer.state == "8bit" and not several
    sums = trained // 2 if rounded else trained
    gradients = sums if options.accumulates or rounded else 0
    hidden = hf.config.get_text_config().hidden_size
    by_layer = {layer: _layer_bytes(layer, hf.config, config, options) for layer in dict.fromkeys(layers)}
    activations = tokens * sum(by_layer[layer][0] for layer in layers)
    # The final norm keeps its input and what it scales; its result is float32 where its input is.
    last = tokens * hidden * (2 * options.hidden_size + FLOAT32)
    gathered = _gathered_bytes([*units, *block_units], outer, config, options)
    # Each of the ranks that compute a micro-batch together computes all of its images.
    tower, block_backward = tower_bytes(hf, replace(options, tokens=tokens * config.context_parallel))

    yield LearnerMemory(
        **state,
        gradients=gradients,
        gathered=gathered,
        activations=tower + activations + last,
        logits=_head(hf, config, options),
    )
    below = tower + activations
    grown = embedding_gradient if tied else _shards(_read_weights(head), options.shards, trained=True)
    for layer, unit, layer_copies in reversed(list(zip(layers, units, copied, strict=True))):
        saved, backward, gradient_bytes = by_layer[layer]
        current_gradients = max(gradients + (embedding_gradient if tied else 0), grown) + reduced * unit
        if rounded:
            trained_numbers = sum(weight.count for weight in layer.weights if weight.trained)
            current_gradients += FLOAT32 * (trained_numbers - layer_copies) + size * layer_copies
        casts = size * (unit - layer_copies) if options.bfloat16 and not several and options.compiled else 0
        yield LearnerMemory(
            **state, gradients=current_gradients, gathered=gathered + casts, activations=below + tokens * backward
        )
        below -= tokens * saved
        if not rounded:
            grown += gradient_bytes
    if blocks:
        of_blocks = gradients + sum(_shards(block, options.shards, trained=True) for block in blocks)
        yield LearnerMemory(
            **state,
            gradients=max(of_blocks, grown) + reduced * max(block_units),
            gathered=gathered,
            activations=tower + block_backward,
        )
    added = embedding_gradient * (1 + (tied and options.accumulates)) + reduced * outer
    yield LearnerMemory(**state, gradients=sums + added, gathered=size * outer if several else 0)
    if config.cpu_offload == "optimizer":
        largest = max(2 * FLOAT32 * _shard(weight, options.shards) for weight in model.weights)
        yield LearnerMemory(**state | {"optimizer": min(states, max(largest, CHUNK_BYTES))}, gradients=trained)


def _layer_bytes(layer: _Layer, model: Any, config: LearnerConfig, options: MemoryOptions) -> tuple[int, int, int]:
    """Return what a layer keeps for each token, what its backward pass has for each, and its shards' gradients."""
    has_exchange = config.expert_parallel > 1 and layer.expert_count > 0
    # Layers with divided experts are not compiled.
    layer_options = replace(options, compiled=options.compiled and not has_exchange)
    widths = _widths(layer, model, config, compiled=layer_options.compiled, exchanges=has_exchange)
    gradient_bytes = _shards(layer.weights, options.shards, trained=True) + _adapters(layer, config, options)
    return saved_bytes(widths, layer_options), backward_bytes(widths, layer_options), gradient_bytes


def _others_experts(layer: _Layer, config: LearnerConfig) -> int:
    """Return the numbers of a layer's experts that a rank does not gather: other ranks compute them."""
    return layer.expert_count - layer.expert_count // config.expert_parallel


def _optimizer(model: FsdpMemory, config: LearnerConfig, ranks: int) -> int:
    if config.optimizer.state == "8bit":
        trained = [weight.shape for weight in model.weights if weight.trained]
        return sum(moment_bytes((math.ceil(shape[0] / ranks), *shape[1:])) for shape in trained)
    moments = 2 * _shards(model.weights, ranks, trained=True)
    if config.optimizer.name == "muon":
        weights = (weight for layer in model.layers for weight in layer.weights)
        matrices = [weight for weight in weights if len(weight.shape) == 2 and not weight.is_vector and weight.trained]
        moments -= FLOAT32 * sum(_shard(matrix, ranks) for matrix in matrices)
    return moments


def _adapters(layer: _Layer, config: LearnerConfig, options: MemoryOptions) -> int:
    """Return the bytes of the first rank's shards of a layer's LoRA adapters, as if every linear layer had one."""
    if config.lora is None:
        return 0
    numbers = len(config.lora.policies) * config.lora.rank * sum(size + out for size, out in layer.linears)
    return FLOAT32 * math.ceil(numbers / options.shards)


def _gathered_bytes(units: list[int], outer: int, config: LearnerConfig, options: MemoryOptions) -> int:
    if options.ranks > 1:
        return options.size * (outer + (2 * max(units) if config.reshard_after_forward else sum(units)))
    # Without compilation autocast keeps its copies until the end of the pass.
    return options.size * (sum(units) + outer) if options.bfloat16 and not options.compiled else 0


def _output(hf: Any) -> nn.Linear:
    """Return the language head, or the value head."""
    head: nn.Linear | None = hf.get_output_embeddings()
    return value_head(hf) if head is None else head


def _head(hf: Any, config: LearnerConfig, options: MemoryOptions) -> int:
    """Return the bytes at the gradient of the second chunk's logits, or at the product of it with hidden states."""
    head = _output(hf)
    chunk = min(config.logits_chunk, options.tokens)
    array: int = chunk * head.weight.shape[0]
    of_weight, copy = (
        FLOAT32 * trained_count(head.parameters()),
        options.size * head.weight.numel() if options.bfloat16 else 0,
    )
    several = of_weight if options.tokens > chunk else 0
    derived = FLOAT32 * array * (_LOGITS if options.compiled else _LOGITS_EAGER) + several
    return max(derived, options.size * array + several + max(of_weight, copy))


def _count(weights: Iterable[_Weight]) -> int:
    return sum(weight.count for weight in weights)


def _shards(weights: Iterable[_Weight], ranks: int, *, trained: bool) -> int:
    """Return the bytes of the first rank's shards of all weights in float32, or of those that are trained."""
    return FLOAT32 * sum(_shard(weight, ranks) for weight in weights if weight.trained or not trained)


def _shard(weight: _Weight, ranks: int) -> int:
    """Return the numbers of a weight that FSDP gives to the first rank."""
    rows = weight.shape[0] if weight.shape else 1
    return math.ceil(rows / ranks) * (weight.count // max(rows, 1))


def _widths(layer: _Layer, model: Any, config: LearnerConfig, *, compiled: bool, exchanges: bool) -> LayerWidths:
    text = model.get_text_config()
    hidden = int(text.hidden_size)
    heads = int(text.num_attention_heads)
    attention = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    shapes = [weight.shape for weight in layer.weights]
    products = list(layer.linears)
    if not products:  # GPT-2 has its own class of linear layers
        products = [(shape[0], shape[1]) for shape in shapes if len(shape) == 2]
    active = int(getattr(text, "num_experts_per_tok", None) or 0)
    # Experts, fused: each of the active ones has its own results.
    products += [(shape[2], shape[1]) for shape in shapes if len(shape) == 3 for _ in range(active)]
    if compiled:
        inputs = 2 * hidden + attention + sum(width for width, _ in products if width not in (hidden, attention))
    else:
        inputs = sum(width for width, _ in products)
    if exchanges:  # what is received, and what comes back
        inputs += 2 * active * hidden
    results = [width for _, width in products]
    if config.lora is not None:  # of both factors of an adapter, whose result is added to the product's
        results += [width for _, out in products for width in (config.lora.rank, out)]
    keys = attention * int(getattr(text, "num_key_value_heads", None) or heads) // heads
    return LayerWidths(
        hidden, heads, attention, sum(results) - hidden, inputs, attention + keys, max(results, default=hidden)
    )
