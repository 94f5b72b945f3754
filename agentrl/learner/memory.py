"""Estimate of the memory that a learner rank needs, from a model without weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from agentrl.config.learner import LearnerConfig, Recompute
from agentrl.learner.fsdp.layers import decoder_layers

_MASTER = 4
"""Bytes of a float32 number: weights, gradients, moments, logits."""
_LOGITS = 3
"""Logits of a chunk, their exponentials and their gradient."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on the device of one rank at the peak of an optimizer step."""

    weights: int
    """float32, this rank's shards."""
    gradients: int
    """float32, this rank's shards of trained weights."""
    optimizer: int
    """AdamW's two moments, this rank's shards; Muon has one for matrices of layers."""
    reference: int
    """The frozen reference policy, this rank's shards; 0 without one."""
    gathered: int
    """Whole weights of layers, and the gradient of one, in the dtype of matrix products."""
    activations: int
    """What the backward pass reads, and one layer that is computed again."""
    logits: int
    """Of a chunk of tokens (``learner.logits_chunk``)."""

    @property
    def total(self) -> int:
        """The sum. Fragmentation, NCCL's buffers and the CUDA context come on top, a few GB."""
        return sum(getattr(self, field.name) for field in fields(self))


def learner_memory(
    hf: Any,
    config: LearnerConfig,
    *,
    ranks: int,
    tokens: int,
    bfloat16: bool,
    recompute: Recompute,
    compiled: bool,
    reference: bool = False,
) -> LearnerMemory:
    """Estimate the memory of one of ``ranks`` ranks.

    Args:
        hf: a model of transformers, such as `agentrl.models.load.empty_model` returns; its weights are not read.
            Those without ``requires_grad`` are not trained.
        config: optimizer, sharding and chunk of logits.
        ranks: that share the weights.
        tokens: of a micro-batch.
        bfloat16: whether matrix products are computed in bfloat16, else float32.
        recompute: what is computed again in the backward pass.
        compiled: whether layers are compiled, so that a single rank casts weights where they are used.
        reference: whether there is a reference policy.

    """
    size = 2 if bfloat16 else _MASTER
    shards = _MASTER * sum(_shard(parameter, ranks) for parameter in hf.parameters())
    trained = _MASTER * sum(_shard(parameter, ranks) for parameter in hf.parameters() if parameter.requires_grad)
    layers = decoder_layers(hf)
    moments = 2 * trained
    if config.optimizer.name == "muon":
        matrices = [p for layer in layers for p in layer.parameters() if p.ndim == 2 and p.requires_grad]
        moments -= _MASTER * sum(_shard(matrix, ranks) for matrix in matrices)
    units = [_count(layer) for layer in layers]
    rest = _count(hf) - sum(units)
    if ranks == 1:
        # Without compilation autocast keeps its copies until the end of the pass.
        gathered = size * (max(units) + rest if compiled else _count(hf)) if bfloat16 else 0
    else:
        there = 2 * max(units) if config.reshard_after_forward else sum(units)
        # Beside the gathered weights there are the gradient of a unit, and its float32 copy that is reduced.
        gathered = size * (there + rest) + (size + _MASTER) * max(*units, rest)
    of_layers = [_activations(layer, hf.config, recompute) for layer in layers]
    again = 0 if recompute == "none" else max(_activations(layer, hf.config, "none") for layer in layers)
    vocabulary = hf.get_input_embeddings().num_embeddings
    return LearnerMemory(
        weights=shards,
        gradients=trained,
        optimizer=moments,
        reference=shards if reference else 0,
        gathered=gathered,
        activations=size * tokens * (sum(of_layers) + again),
        logits=_LOGITS * _MASTER * min(config.logits_chunk, tokens) * vocabulary,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shard(parameter: nn.Parameter, ranks: int) -> int:
    """Return the numbers of a weight that FSDP gives to the first rank."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return math.ceil(rows / ranks) * (parameter.numel() // max(rows, 1))


def _activations(layer: nn.Module, config: Any, recompute: Recompute) -> int:
    """Return the numbers that a layer keeps for each token: its input, and results and inputs of its products."""
    hidden = int(config.get_text_config().hidden_size)
    if recompute == "full":
        return hidden
    results, inputs = 0, 0
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            results, inputs = results + module.out_features, inputs + module.in_features
    active = int(getattr(config.get_text_config(), "num_experts_per_tok", None) or 0)
    for parameter in layer.parameters():
        if parameter.ndim == 3 and active:  # experts, fused
            results, inputs = results + active * parameter.shape[1], inputs + active * parameter.shape[2]
    # Attention's result is about as large as the input of the product after it.
    return 2 * hidden + results if recompute == "selective" else 2 * hidden + results + inputs
