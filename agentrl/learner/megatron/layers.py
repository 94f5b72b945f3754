"""Layers of Megatron-Core models without Transformer Engine: norm, rotary embedding and attention over packed rows.

Packed rows are passed as `PackedTokens`, with a position for each token, in the place of Megatron-Core's ``PackedSeqParams``.
Its own ``thd`` format reads the rows' bounds on the host in every layer.

Legend: ``L`` tokens, ``H`` heads, ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from agentrl.config.learner import Recompute
from agentrl.learner.attention import DividedRows, PackedRows, packed_attention
from agentrl.learner.layers import prepare_forward


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """A micro-batch's packed rows as layers read them. The last three are fields of ``PackedSeqParams``."""

    position_ids_L: torch.Tensor
    """int64, of this rank's tokens in their rows."""
    rows: PackedRows | DividedRows
    """Rows among the tokens of all ranks of context parallelism, for attention."""
    experts: torch.Tensor | None = None
    """``[layers, T, K]`` recorded experts of the tokens of this rank's routers; None if the routers choose."""
    rotary_cos_sin: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cosines and sines ``[L, 1, 1, D]`` of the tokens' positions, the same in all layers; None with latent attention."""
    loss_weight: float = 0.0
    """Sum of the weights of the micro-batch's tokens in the loss: its part of an optimizer step."""
    qkv_format: str = "sbhd"
    cp_group: None = None
    local_cp_size: None = None


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32. The weight is cast to the input's dtype.

    Args:
        config: of Megatron-Core.
        hidden_size: of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # With sequence parallelism each rank has the gradient of its own tokens: Megatron-Core sums marked gradients.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised and scaled values."""
        return F.rms_norm(hidden, (hidden.shape[-1],), self.weight.to(hidden.dtype), self.eps)


class LatentNorm(RMSNorm):
    """Norm of the latents of multi-head latent attention, whose epsilon is not in a model's configuration."""

    def __init__(self, config: Any, hidden_size: int, **options: Any) -> None:
        super().__init__(config, hidden_size)


class PackedAttention(nn.Module):
    """Attention within packed rows; see `agentrl.learner.attention`. Megatron-Core's core attention."""

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **options: Any) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.interleaved = config.rotary_interleaved

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedTokens,
        **options: Any,
    ) -> torch.Tensor:
        """Return attention's output ``[L, 1, H·D]``; query, key and value are ``[L, 1, H, D]`` or ``[L, H, D]``."""
        if packed_seq_params.rotary_cos_sin is not None:
            cos, sin = packed_seq_params.rotary_cos_sin
            query, key = (_rotate(states, cos, sin, self.interleaved) for states in (query, key))
        q, k, v = (s.reshape(1, len(s), -1, s.shape[-1]).transpose(1, 2) for s in (query, key, value))
        attended, _ = packed_attention(self, q, k, v, None, packed=packed_seq_params.rows, scaling=self.scale)
        return attended.reshape(len(query), 1, -1)


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return ``[L, 1, H, D]`` with pairs of dimensions rotated, as many of the first ones as there are angles."""
    size = cos.shape[-1]
    rotary, plain = states[..., :size], states[..., size:]
    if interleaved:
        rotated_half = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotary.chunk(2, -1)
        rotated_half = torch.cat((-second, first), -1)
    rotary = rotary * cos + rotated_half * sin
    return torch.cat((rotary, plain), -1) if plain.shape[-1] else rotary


class PackedRotary(nn.Module):
    """Rotary embedding at given positions.

    Latent attention calls `get_rotary_seq_len` and then the module with its result; here these are the tokens. Other attention
    gets `cos_sin` with the tokens, and Megatron-Core no embedding: it would compute cosines in every layer.

    Args:
        inv_freq: of the pairs of dimensions.
        scaling: factor of sines and cosines, for latent attention; others have it in their softmax scale.
        interleaved: whether the pairs are neighbours, instead of a distance of half the dimensions apart.
        latent: whether it belongs to multi-head latent attention, which takes ``[L, 1, D]`` and the factor.
    """

    def __init__(self, inv_freq: torch.Tensor, scaling: float, interleaved: bool, latent: bool) -> None:
        super().__init__()
        self.inv_freq, self.scaling = inv_freq, scaling
        self.interleaved, self.latent = interleaved, latent

    def get_rotary_seq_len(
        self, context: object, decoder: object, hidden: object, config: object, packed: PackedTokens
    ) -> PackedTokens:
        """Return ``packed``: Megatron-Core passes the result to `forward`."""
        return packed

    def forward(self, packed: PackedTokens, *, packed_seq: bool = False, cp_group: None = None) -> Any:
        """Return the angles ``[L, 1, D]`` of the tokens' positions, and the factor, for latent attention."""
        return (self._angles(packed.position_ids_L)[:, None], self.scaling) if self.latent else None

    def cos_sin(self, position_ids_L: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `PackedTokens.rotary_cos_sin`."""
        if self.latent:
            return None
        angles = self._angles(position_ids_L)[:, None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _angles(self, position_ids_L: torch.Tensor) -> torch.Tensor:
        """Return the angles ``[L, D]``."""
        angles = torch.outer(position_ids_L.float(), self.inv_freq)
        return angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)


def prepare_decoder(layers: Iterable[Any], *, compiled: bool, recompute: Recompute) -> None:
    """Have the layers of a chunk compiled, and computed again in the backward pass, as `agentrl.learner.layers` does.

    Of a layer with experts only attention is compiled, as a compiler does not take how tokens are dispatched. Selective
    recomputation leaves the experts alone: they call functions that Megatron-Core compiles, which it cannot look into.
    """
    for layer in layers:
        compiled = compiled and not _gathers_heads(layer.config)
        if not layer.is_moe_layer:
            layer.forward = prepare_forward(layer.forward, compiled=compiled, recompute=recompute)
            continue
        within: Recompute = "none" if recompute == "full" else recompute
        layer._forward_attention = prepare_forward(layer._forward_attention, compiled=compiled, recompute=within)
        if recompute == "full":
            layer.forward = prepare_forward(layer.forward, compiled=False, recompute="full")


def _gathers_heads(config: Any) -> bool:
    """Return whether attention has collectives of Megatron-Core, which a compiler does not take."""
    ranks: int = config.tensor_model_parallel_size
    return ranks > 1 and (config.multi_latent_attention or config.num_query_groups < ranks)


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer with a further norm on the outputs of attention and MLP, as in GLM-4."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda: Any = _norm_before_add(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: Any = _norm_before_add(self.post_mlp_layernorm, self.mlp_bda)
        # Megatron-Core enables gradients for the addition, even in a pass without: the norm would have one.
        self.bias_dropout_add_exec_handler: Any = nullcontext


def _norm_before_add(norm: nn.Module, add: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    """Wrap Megatron-Core's function that adds an output to the residual: the output is normalized first."""

    def make(training: bool, fused: bool) -> Callable[..., Any]:
        def add_normalized(output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> Any:
            output, bias = output_with_bias
            assert bias is None, "a bias would be added after the norm"
            return add(training, fused)((norm(output), None), residual, dropout)

        return add_normalized

    return make
