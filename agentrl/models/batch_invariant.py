"""Batch-invariant products and attention on CPUs: what they return for a token does not depend on the other tokens of a call.

Libraries choose the order of summation by the sizes of a product. Here all products have fixed sizes: `TILE` tokens, padded
with zeros, and numbers of keys that depend on positions alone. An engine that samples token by token and a learner that scores
whole rows then get the same bits (He and Thinking Machines Lab 2025, "Defeating Nondeterminism in LLM Inference").

Legend: ``N`` tokens, ``I`` and ``O`` inputs and outputs of a layer, ``H`` query heads, ``K`` key heads, ``D`` head size, ``C``
keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from agentrl.core.errors import ModelError

TILE = 16
"""Tokens of a product."""
KEYS = 128
"""Keys of a product are a multiple of this: of ``TILE``, so that all tokens of a tile have equally many."""


class _TiledProduct(torch.autograd.Function):
    """``x Wᵀ`` in tiles; its gradients are plain products."""

    @staticmethod
    def forward(ctx: object, lines_N_I: Tensor, weight_O_I: Tensor) -> Tensor:
        context: Any = ctx
        context.save_for_backward(lines_N_I, weight_O_I)
        count, padding = len(lines_N_I), -len(lines_N_I) % TILE
        padded = F.pad(lines_N_I, (0, 0, 0, padding)) if padding else lines_N_I.contiguous()
        output, weight_I_O = padded.new_empty(len(padded), len(weight_O_I)), weight_O_I.t()
        for tile, tile_output in zip(torch.split(padded, TILE), torch.split(output, TILE), strict=True):
            torch.mm(tile, weight_I_O, out=tile_output)
        return output[:count]

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        context: Any = ctx
        lines_N_I, weight_O_I = context.saved_tensors
        (gradient_N_O,) = gradients
        needs_lines, needs_weight = context.needs_input_grad
        return (
            gradient_N_O @ weight_O_I if needs_lines else None,
            gradient_N_O.t() @ lines_N_I if needs_weight else None,
        )


def tiled_product(lines_N_I: Tensor, weight_O_I: Tensor) -> Tensor:
    """Return ``[N, O]`` products of lines with the rows of a weight, with gradients."""
    apply: Any = _TiledProduct.apply
    product: Tensor = apply(lines_N_I, weight_O_I)
    return product


class BatchInvariantLinear(nn.Linear):
    """A linear layer that computes by `tiled_product`."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = tiled_product(input.flatten(0, -2), self.weight).view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def make_batch_invariant(model: nn.Module, key: str) -> None:
    """Have all linear layers of a dense model compute by `tiled_product`.

    Raises:
        ModelError: the model has other layers with weights than linear ones, embeddings and norms; the message names ``key``.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = BatchInvariantLinear
        elif next(module.parameters(recurse=False), None) is not None and not (
            isinstance(module, nn.Embedding) or type(module).__name__.endswith("Norm")
        ):
            raise ModelError(
                f"{key}=true: {name} of {type(model).__name__} is a {type(module).__name__}, and only dense models of linear "
                f"layers, embeddings and norms are batch-invariant; leave out {key}, or set another model.path"
            )


def batch_invariant_attention(
    query_H_N_D: Tensor, key_K_C_D: Tensor, value_K_C_D: Tensor, first: int, scale: float, window: int | None
) -> Tensor:
    """Return the causal attention ``[N, H, D]`` of consecutive tokens of one row, with gradients.

    Args:
        query_H_N_D: of the tokens at positions from ``first`` on.
        key_K_C_D: of the row's tokens; more may follow. ``C`` is a multiple of `KEYS`, and all numbers are finite.
        value_K_C_D: the same.
        first: position of the first query.
        scale: of the scores.
        window: most keys that a query sees, its own included; None: all.
    """
    heads, count, size = query_H_N_D.shape
    key_heads = len(key_K_C_D)
    outputs = []
    begin = first - first % TILE
    while begin < first + count:
        positions = range(max(begin, first), min(begin + TILE, first + count))
        tile = query_H_N_D[:, positions.start - first : positions.stop - first]
        tile = F.pad(tile, (0, 0, positions.start - begin, begin + TILE - positions.stop))
        keys = (begin // KEYS + 1) * KEYS
        scores = torch.bmm(tile.reshape(key_heads, -1, size) * scale, key_K_C_D[:, :keys].transpose(1, 2))
        query_positions, key_positions = torch.arange(begin, begin + TILE)[:, None], torch.arange(keys)
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        weights = scores.view(heads, TILE, keys).masked_fill(hidden, float("-inf")).softmax(-1)
        attended = torch.bmm(weights.view(key_heads, -1, keys), value_K_C_D[:, :keys])
        attended = attended.view(heads, TILE, -1)[:, positions.start - begin : positions.stop - begin]
        outputs.append(attended.transpose(0, 1))
        begin += TILE
    return torch.cat(outputs)
