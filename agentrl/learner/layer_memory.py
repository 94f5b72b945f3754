"""Activations of layers of transformers: what they keep for each token until the backward pass, and what that pass has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from agentrl.learner.layers import vision_blocks
from agentrl.learner.memory import FLOAT32, MemoryOptions


@dataclass(frozen=True, slots=True)
class LayerWidths:
    """Numbers of a layer for each token."""

    hidden: int
    heads: int
    attention: int
    """Numbers of all heads."""
    results: int
    """Results of products, except the last, which is only added."""
    inputs: int
    """Inputs of products; products with the same input count once if the layer is compiled."""
    rotated: int
    """Queries and keys as attention takes them."""
    widest: int
    """The largest result."""


def saved_bytes(widths: LayerWidths, options: MemoryOptions) -> int:
    """Return the bytes that a layer keeps for each token until its backward pass: always its input."""
    input_bytes = options.hidden_size * widths.hidden
    if options.recompute == "full":
        return input_bytes
    attended = input_bytes + options.size * widths.attention + FLOAT32 * widths.heads  # and its logarithms
    if options.recompute == "all_but_attention":
        return attended
    return attended + options.size * widths.results if options.recompute == "selective" else _all(widths, options)


def _all(widths: LayerWidths, options: MemoryOptions) -> int:
    """Return the bytes that a layer keeps for each token if nothing is computed again."""
    input_bytes = options.hidden_size * widths.hidden
    if options.compiled:
        return input_bytes + options.size * (widths.results + widths.inputs + widths.rotated)
    # In addition: what the two norms keep, and what activations and rotations make of the products' results.
    return 2 * (input_bytes + FLOAT32 * widths.hidden) + options.size * (2 * widths.results + widths.inputs)


def backward_bytes(widths: LayerWidths, options: MemoryOptions) -> int:
    """Return the bytes for each token in a layer's backward pass, without what it has kept: computed again, and gradients."""
    gradients = 4 * options.hidden_size * widths.hidden + 5 * options.size * widths.widest
    # Attention adds gradients of queries up in float32, and has those of keys and values for every query head.
    gradients += (FLOAT32 + 2 * options.size) * widths.attention
    return _all(widths, options) - saved_bytes(widths, options) + gradients


def tower_bytes(hf: PreTrainedModel, options: MemoryOptions) -> tuple[int, int]:
    """Return the activations of the vision tower, as if all tokens stood for images, and those of a block's backward pass.

    A frozen tower keeps none. What it computes is computed before layers of the text model, and is less than these.

    Args:
        hf: a model of transformers; weights without ``requires_grad`` are not trained.
        options: of the rank, with the tokens whose images it computes.
    """
    blocks = [block for block in vision_blocks(hf) if trained_count(block.parameters())]
    if not blocks:
        return 0, 0
    vision: Any = hf.config.vision_config
    # The merger joins neighbouring patches to a token; of tiles it is the connector's factor.
    merge = int(getattr(vision, "spatial_merge_size", 0) or getattr(hf.config, "scale_factor", 1))
    patches, hidden = options.tokens * merge**2, int(vision.hidden_size)
    heads = int(getattr(vision, "num_heads", 0) or vision.num_attention_heads)
    products = [(m.in_features, m.out_features) for m in blocks[0].modules() if isinstance(m, nn.Linear)]
    results, inputs = (sum(sizes) for sizes in zip(*((out, size) for size, out in products), strict=True))
    widths = LayerWidths(hidden, heads, hidden, results - hidden, inputs, 2 * hidden, max(out for _, out in products))
    plain = replace(options, compiled=False)
    return len(blocks) * patches * saved_bytes(widths, plain), patches * backward_bytes(widths, plain)


def trained_count(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many numbers of weights are trained."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
