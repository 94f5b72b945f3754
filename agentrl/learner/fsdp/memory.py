"""Estimate of the memory that an FSDP rank needs, from a model without weights.

The peak is that of the moment of an optimizer step that needs most. Before the backward pass all activations are there, and
the gradients of earlier micro-batches. In the backward pass gradients appear while activations are freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
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


def fsdp_memory(hf: Any, config: LearnerConfig, options: MemoryOptions) -> LearnerMemory:
    """Return the memory of one rank at the moment of an optimizer step that needs most.

    Args:
        hf: a model of transformers, such as `agentrl.models.load.empty_model` returns; its weights are not read. With a
            value head it is a critic.
            Those without ``requires_grad`` are not trained.
        config: optimizer, sharding and chunk of logits.
        options: ranks, tokens and precision.
    """
    return max(_moments(hf, config, options), key=lambda moment: moment.total)


def _moments(hf: Any, config: LearnerConfig, options: MemoryOptions) -> Iterator[LearnerMemory]:
    """Yield the memory at the head, at each layer of the backward pass, at the embeddings, the last of it, and in the update."""
    size, several, tokens = options.size, options.ranks > 1, options.tokens
    layers, blocks = decoder_layers(hf), vision_blocks(hf)
    # To go through the modules of a model takes longer than what is computed of their parameters.
    parameters = {module: tuple(module.parameters()) for module in (hf, *layers, *blocks)}
    units = [_count(parameters[layer]) for layer in layers]
    block_units = [_count(parameters[block]) for block in blocks]
    outer = _count(parameters[hf]) - sum(units) - sum(block_units)
    exchanges = [config.expert_parallel > 1 and bool(expert_modules(layer)) for layer in layers]
    units = [
        unit if config.expert_parallel == 1 else _whole_count(layer, config.expert_parallel)
        for layer, unit in zip(layers, units, strict=True)
    ]
    # Layers with divided experts are not compiled.
    layer_options = [replace(options, compiled=options.compiled and not has_exchange) for has_exchange in exchanges]
    shards, adapters = (
        _shards(parameters[hf], options.shards, trained=False),
        sum(_adapters(layer, config, options) for layer in layers),
    )
    trained = _shards(parameters[hf], options.shards, trained=True) + adapters
    states = _optimizer(hf, config, options.shards) + 2 * adapters
    state = {"weights": shards + adapters, "optimizer": 0 if config.cpu_offload == "optimizer" else states}
    state |= {"reference": shards if options.reference else 0}
    copied = [0] * len(layers)
    if copies_weights(
        config, options.recompute, ranks=options.ranks, bfloat16=options.bfloat16, compiled=options.compiled
    ):
        copied = [sum(linear.weight.numel() for linear in copied_layers([layer])) for layer in layers]
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
    widths = [
        _widths(layer, hf.config, config, compiled=layer_option.compiled, exchanges=has_exchange)
        for layer, layer_option, has_exchange in zip(layers, layer_options, exchanges, strict=True)
    ]
    layer_activations = [
        tokens * saved_bytes(width, layer_option) for width, layer_option in zip(widths, layer_options, strict=True)
    ]
    # The final norm keeps its input and what it scales; its result is float32 where its input is.
    last = tokens * hidden * (2 * options.hidden_size + FLOAT32)
    gathered = _gathered_bytes([*units, *block_units], outer, config, options)
    # Each of the ranks that compute a micro-batch together computes all of its images.
    tower, block_backward = tower_bytes(hf, replace(options, tokens=tokens * config.context_parallel))

    yield LearnerMemory(
        **state,
        gradients=gradients,
        gathered=gathered,
        activations=tower + sum(layer_activations) + last,
        logits=_head(hf, config, options),
    )
    below = tower + sum(layer_activations)
    grown = embedding_gradient if tied else _shards(head.parameters(), options.shards, trained=True)
    of_layers = list(zip(layers, units, copied, layer_activations, widths, layer_options, strict=True))
    for layer, unit, layer_copies, layer_bytes, width, layer_option in reversed(of_layers):
        current_gradients = max(gradients + (embedding_gradient if tied else 0), grown) + reduced * unit
        if rounded:
            current_gradients += FLOAT32 * (trained_count(parameters[layer]) - layer_copies) + size * layer_copies
        casts = size * (unit - layer_copies) if options.bfloat16 and not several and options.compiled else 0
        again = tokens * backward_bytes(width, layer_option)
        yield LearnerMemory(**state, gradients=current_gradients, gathered=gathered + casts, activations=below + again)
        below -= layer_bytes
        if not rounded:
            grown += _shards(parameters[layer], options.shards, trained=True) + _adapters(layer, config, options)
    if blocks:
        of_blocks = gradients + sum(_shards(parameters[block], options.shards, trained=True) for block in blocks)
        yield LearnerMemory(
            **state,
            gradients=max(of_blocks, grown) + reduced * max(block_units),
            gathered=gathered,
            activations=tower + block_backward,
        )
    added = embedding_gradient * (1 + (tied and options.accumulates)) + reduced * outer
    yield LearnerMemory(**state, gradients=sums + added, gathered=size * outer if several else 0)
    if config.cpu_offload == "optimizer":
        largest = max(2 * FLOAT32 * _shard(parameter, options.shards) for parameter in hf.parameters())
        yield LearnerMemory(**state | {"optimizer": min(states, max(largest, CHUNK_BYTES))}, gradients=trained)


def _optimizer(hf: Any, config: LearnerConfig, ranks: int) -> int:
    if config.optimizer.state == "8bit":
        shards = [p.new_empty((math.ceil(len(p) / ranks), *p.shape[1:])) for p in hf.parameters() if p.requires_grad]
        return sum(moment_bytes(shard.shape) for shard in shards)
    moments = 2 * _shards(hf.parameters(), ranks, trained=True)
    if config.optimizer.name == "muon":
        weights = [weight for layer in decoder_layers(hf) for weight in layer.named_parameters()]
        matrices = [p for name, p in weights if p.ndim == 2 and not is_vector(name, p) and p.requires_grad]
        moments -= FLOAT32 * sum(_shard(matrix, ranks) for matrix in matrices)
    return moments


def _adapters(layer: nn.Module, config: LearnerConfig, options: MemoryOptions) -> int:
    """Return the bytes of the first rank's shards of a layer's LoRA adapters, as if every linear layer had one."""
    if config.lora is None:
        return 0
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    numbers = (
        len(config.lora.policies)
        * config.lora.rank
        * sum(linear.in_features + linear.out_features for linear in linears)
    )
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


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _whole_count(layer: nn.Module, expert_parallel: int) -> int:
    """Return the numbers of a layer that a rank gathers: of experts those that it computes."""
    experts = sum(_count(module.parameters()) for module in expert_modules(layer))
    return _count(layer.parameters()) - experts + experts // expert_parallel


def _shards(parameters: Iterable[nn.Parameter], ranks: int, *, trained: bool) -> int:
    """Return the bytes of the first rank's shards of all weights in float32, or of those that are trained."""
    return FLOAT32 * sum(_shard(p, ranks) for p in parameters if p.requires_grad or not trained)


def _shard(parameter: nn.Parameter, ranks: int) -> int:
    """Return the numbers of a weight that FSDP gives to the first rank."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / ranks) * (parameter.numel() // max(rows, 1))


def _widths(layer: nn.Module, model: Any, config: LearnerConfig, *, compiled: bool, exchanges: bool) -> LayerWidths:
    text = model.get_text_config()
    hidden = int(text.hidden_size)
    heads = int(text.num_attention_heads)
    attention = heads * int(getattr(text, "head_dim", None) or hidden // heads)
    products = [(m.in_features, m.out_features) for m in layer.modules() if isinstance(m, nn.Linear)]
    if not products:  # GPT-2 has its own class of linear layers
        products = [(p.shape[0], p.shape[1]) for p in layer.parameters() if p.ndim == 2]
    active = int(getattr(text, "num_experts_per_tok", None) or 0)
    # Experts, fused: each of the active ones has its own results.
    products += [(p.shape[2], p.shape[1]) for p in layer.parameters() if p.ndim == 3 for _ in range(active)]
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
