"""Layers of Megatron-Core models without Transformer Engine: norm, rotary embedding, attention over packed rows, linears, heads.

Packed rows are passed as `PackedTokens`, with a position for each token, in the place of Megatron-Core's ``PackedSeqParams``.
Its own ``thd`` format reads the rows' bounds on the host in every layer. Its own linears wait for collectives and write to
shared buffers within their autograd functions, around which a compiler would cut a layer into pieces.

Legend: ``L`` tokens that the rank has of a micro-batch, ``N`` tokens to score, ``T`` tokens of a tensor-parallel rank's part,
``P`` tensor-parallel ranks, ``I`` inputs, ``O`` outputs of a linear, ``H`` heads (of a linear's or a head's input: the hidden
size), ``D`` head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from agentrl.algo.base import TokenScores
from agentrl.config.learner import Recompute
from agentrl.learner.attention import DividedRows, PackedRows, packed_attention
from agentrl.learner.context_parallel import all_gather, all_reduce, reduce_scatter, with_reduced_gradient
from agentrl.learner.head import HeadOptions, VocabularyPart, token_scores, token_values
from agentrl.learner.layers import prepare_forward
from agentrl.learner.token_support import TokenSupport


@dataclass(frozen=True, slots=True)
class LayerFeatures:
    """What the first layers add to their outputs (Qwen3-VL's deepstack)."""

    places_M: torch.Tensor
    """int64, ascending, among the tokens that the rank has."""
    layers_M_H: tuple[torch.Tensor, ...]
    """By layer."""


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
    padding: torch.Tensor | None = None
    """bool ``[T]`` of the tokens of this rank's routers, for their losses."""
    router_share: float = 1.0
    """The tokens of this rank's routers, without padding, over those of all ranks together."""
    layer_features: LayerFeatures | None = None
    """What the first layers add to their outputs, of a micro-batch with images; set by the chunk."""
    qkv_format: str = "sbhd"
    cp_group: None = None
    local_cp_size: None = None


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32. The weight is cast to the input's dtype."""

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
    """Attention within packed rows; see `agentrl.learner.attention`. Megatron-Core's core attention.

    Args:
        config: of Megatron-Core.
        softmax_scale: factor of the scores; None is that of the head's size.
        window: size of the layer's sliding window.
        has_sinks: whether each head has an attention sink.
        options: not used.
    """

    def __init__(
        self,
        config: Any,
        *,
        softmax_scale: float | None = None,
        window: int | None = None,
        has_sinks: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.scale, self.window = softmax_scale, window
        self.interleaved = config.rotary_interleaved
        self.sinks: nn.Parameter | None = None
        if has_sinks:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = torch.cuda.current_device()
            self.sinks = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks for distributed checkpoints, divided among tensor-parallel ranks by heads."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"sinks": 0}, sharded_offsets
        )
        return state

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
        options = {"scaling": self.scale, "sliding_window": self.window, "s_aux": self.sinks}
        attended, _ = packed_attention(self, q, k, v, None, packed=packed_seq_params.rows, **options)
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
        axes: the axis of each frequency, of a model whose tokens have positions on three axes.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        scaling: float,
        interleaved: bool,
        latent: bool,
        axes: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.axes = axes
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

    def cos_sin(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return `PackedTokens.rotary_cos_sin` of positions ``[L]``, or ``[3, L]`` on three axes."""
        if self.latent:
            return None
        angles = self._angles(position_ids)[:, None, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _angles(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the angles ``[L, D]``."""
        if position_ids.ndim == 2:
            assert self.axes is not None, "its tokens have one position"
            angles = position_ids.index_select(0, self.axes).T.float() * self.inv_freq
        else:
            angles = torch.outer(position_ids.float(), self.inv_freq)
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


class ValueHead(nn.Module):
    """The weights of a linear layer from hidden states to values, initially zeros. Replaces Megatron-Core's output layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))


def logprobs_at(
    chunk: Any,
    hidden_L_H: torch.Tensor,
    places_N: torch.Tensor,
    targets_N: torch.Tensor,
    options: HeadOptions,
    support: TokenSupport | None = None,
) -> TokenScores:
    """Return log-probabilities and entropies; see `token_scores`.

    Args:
        chunk: of the last stage, a ``GPTModel``.
        hidden_L_H: with sequence parallelism a part of the tokens.
        places_N: int64 indices of the hidden states before the tokens, among those of all tensor-parallel ranks.
        targets_N: int64 token ids.
        options: without ``part``.
        support: the ids that the tokens' distributions have.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    # Each rank has the gradient by its part of the vocabulary, which the ranks add up.
    if chunk.config.sequence_parallel:
        hidden_L_H = gather_from_sequence_parallel_region(hidden_L_H, tensor_parallel_output_grad=True)
    elif group.size() > 1:
        hidden_L_H = copy_to_tensor_model_parallel_region(hidden_L_H)
    is_tied = chunk.share_embeddings_and_output_weights
    weight_V_H = chunk.shared_embedding_or_output_weight() if is_tied else chunk.output_layer.weight
    vocabulary_part = VocabularyPart(len(weight_V_H) * group.rank(), group) if group.size() > 1 else None
    hidden_N_H = hidden_L_H.index_select(0, places_N)
    options = replace(options, vocabulary_part=vocabulary_part)
    return token_scores(hidden_N_H, weight_V_H, None, targets_N, options, support)


def values_at(chunk: Any, hidden_L_H: torch.Tensor, places_N: torch.Tensor) -> torch.Tensor:
    """Return values ``[N]``, the same on all tensor-parallel ranks; arguments as of `logprobs_at`."""
    if chunk.config.sequence_parallel:
        # Each rank has the whole gradient, and takes that of its tokens.
        hidden_L_H = gather_from_sequence_parallel_region(hidden_L_H, tensor_parallel_output_grad=False)
    head = chunk.output_layer
    return token_values(hidden_L_H.index_select(0, places_N), head.weight, head.bias)


Result = tuple[torch.Tensor, torch.Tensor | None]
"""The product, and the bias if the caller adds it."""


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are divided among ranks."""

    def forward(self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: None = None) -> Result:
        """Return ``[L, 1, O/P]`` from ``[L, 1, I]``, or with sequence parallelism from ``[T, 1, I]``."""
        if self.is_divided:
            if self.sequence_parallel:
                hidden = all_gather(hidden, self.tensor_ranks, self.tensor_group)
            else:
                hidden = with_reduced_gradient(hidden, self.tensor_group)
        separate = self.skip_bias_add
        return F.linear(hidden, self.weight, None if separate else self.bias), self.bias if separate else None


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are divided among ranks."""

    def forward(self, hidden: torch.Tensor) -> Result:
        """Return ``[L, 1, O]`` from ``[L, 1, I/P]``, or with sequence parallelism ``[T, 1, O]``."""
        product = F.linear(hidden, self.weight)
        if self.is_divided:
            if self.sequence_parallel:
                product = reduce_scatter(product, self.tensor_ranks, self.tensor_group)
            else:
                product = all_reduce(product, self.tensor_group)
        if self.skip_bias_add:
            return product, self.bias
        return product if self.bias is None else product + self.bias, None


def replace_linears(layers: nn.Module) -> None:
    """Replace the linear layers of decoder layers, after they are made: Megatron-Core refuses other classes than its own."""
    classes: dict[Any, Any] = {ColumnParallelLinear: ColumnLinear, RowParallelLinear: RowLinear}
    for module in layers.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
            _describe_ranks(module)


def _describe_ranks(linear: Any) -> None:
    """Set what a compiler can read of a process group. Experts need no collectives: dispatchers give them their tokens."""
    linear.tensor_ranks, linear.tensor_group = linear.tp_group.size(), linear.tp_group.group_name
    linear.is_divided = linear.tensor_ranks > 1 and not linear.explicit_expert_comm
