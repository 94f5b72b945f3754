"""Attention over packed rows, as an attention implementation of transformers.

Rows of a micro-batch must not attend to each other. On GPUs, in bfloat16, variable-length flash attention takes the bounds
of the rows. Elsewhere the rows are gathered into padded groups of similar length, plain causal attention runs on each group
(padding follows a row, so the causal mask excludes it), and the outputs are scattered back: a block-diagonal mask would
compute all masked scores.

Legend: ``R`` bins, ``L`` tokens a bin, ``H`` query heads, ``K`` key heads, ``D`` head size, ``N`` rows, ``T`` tokens of
the longest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from agentrl.batch.microbatch import to_device
from agentrl.core.errors import ModelError
from agentrl.learner import cudnn_attention
from agentrl.learner.context_parallel import Context
from agentrl.learner.tree_attention import (
    CPU_BLOCK,
    CPU_STORED_TOKENS,
    LENGTH_RATIO,
    Tree,
    TreeMasks,
    TreeRows,
    attend_tree,
    row_masks,
    softmax_with_sink,
)
from agentrl.models.batch_invariant import KEYS, batch_invariant_attention

IMPLEMENTATION = "agentrl_packed"
"""Name of the attention implementation, for transformers."""
_LACKING = ("softcap", "sinks", "position_bias", "indices", "block_indices")
"""Options of transformers' attention for score caps, other names of attention sinks, biases and sparse attention."""
_LEAST_BOUNDS = 16
"""Fewer are padded, so that there are few plans."""
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Fewer key heads than query heads; torch 2.11 takes them without an argument."""


class RowBounds(NamedTuple):
    """Where the rows of a micro-batch are among its ``R·L`` tokens, for variable-length flash attention."""

    starts: torch.Tensor
    """int32: where each row starts, padding included; then the number of tokens, repeated up to a power of two."""
    longest: int
    """Maximum tokens of a row, rounded up to a power of two: the number of cuDNN's plans stays small."""
    by_cudnn: bool
    """Whether cuDNN computes heads of its size, without a window; else torch's flash attention does."""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Positions of the rows of a micro-batch, flattened to ``R·L`` tokens."""

    groups: tuple[tuple[torch.Tensor, int, int], ...]
    """``(index, N, T)``: the flat tokens of ``N`` rows of at most ``T`` tokens, int64 ``[N·T]``."""
    back: torch.Tensor
    """int64 ``[R·L]``: each token's index in the concatenated groups; padding of bins has the index after their end."""
    batch_invariant: bool = False
    """Whether attention is that of `agentrl.models.batch_invariant`."""


PackedRows = RowBounds | RowGroups | TreeMasks


@dataclass(frozen=True, slots=True)
class DividedRows:
    """Rows of a micro-batch whose tokens are divided among the ranks of a context."""

    rows: PackedRows | Tree
    """The rows of the full micro-batch."""
    context: Context
    """The ranks that have the other parts."""


def packed_rows(
    position_ids_R_L: torch.Tensor,
    row_R_L: torch.Tensor,
    device: torch.device,
    *,
    flash: bool = False,
    sinks: Collection[int] | None = None,
    batch_invariant: bool = False,
) -> PackedRows:
    """Find the rows: a row starts at each position 0.

    Args:
        position_ids_R_L: int64 on the CPU, from 0 in every row.
        row_R_L: int32 on the CPU, -1 in padding.
        device: of the result.
        flash: whether attention is computed in bfloat16; on a GPU the rows are those of flash attention then.
        sinks: sizes of the sliding windows, if attention has sinks. On a GPU, in bfloat16, rows are masks of flex attention
            then, and ``R`` is 1.
        batch_invariant: see `RowGroups`; not on a GPU.
    """
    if flash and device.type != "cpu" and sinks is not None:
        return row_masks(position_ids_R_L.reshape(-1), device, sinks)
    if flash and device.type == "cuda":
        return _bounds(position_ids_R_L.reshape(-1), device)
    groups = _groups(position_ids_R_L.reshape(-1), row_R_L.reshape(-1), device)
    return replace(groups, batch_invariant=batch_invariant)


def _bounds(flat: torch.Tensor, device: torch.device) -> RowBounds:
    starts = (flat == 0).nonzero()[:, 0]
    bounds = torch.full((max(_LEAST_BOUNDS, _power_of_two(len(starts) + 1)),), flat.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts
    longest = _power_of_two(int(flat.max()) + 1)
    return RowBounds(to_device(bounds, device), longest, cudnn_attention.is_available(device))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _groups(flat: torch.Tensor, row: torch.Tensor, device: torch.device) -> RowGroups:
    """Put rows of similar lengths together. Padding (row -1) attends to nothing."""
    starts = (flat == 0).nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([flat.numel()]))
    real = row[starts] >= 0
    starts, lengths = starts[real], lengths[real]
    back = torch.empty_like(flat)
    groups: list[tuple[torch.Tensor, int, int]] = []
    order = torch.argsort(lengths, descending=True)
    placed, first = 0, 0
    while first < len(order):
        longest = int(lengths[order[first]])
        rows = order[first:]
        rows = rows[lengths[rows] * LENGTH_RATIO >= longest]
        offsets = torch.arange(longest)
        index_N_T = starts[rows, None] + offsets
        inside_N_T = offsets < lengths[rows, None]
        place_N_T = placed + torch.arange(index_N_T.numel()).view_as(index_N_T)
        back[index_N_T[inside_N_T]] = place_N_T[inside_N_T]
        # Padding reads the tokens after the row: this has no effect, and spreads the reads over different tokens.
        groups.append((to_device(index_N_T.remainder(flat.numel()).reshape(-1), device), len(rows), longest))
        placed += index_N_T.numel()
        first += len(rows)
    back[row < 0] = placed
    return RowGroups(tuple(groups), to_device(back, device))


def unpack_rows(
    token_ids_L: torch.Tensor, position_ids_L: torch.Tensor, row_L: torch.Tensor, at_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a micro-batch with one row a bin, padded at its end, for layers that would mix the rows of a bin.

    Args:
        token_ids_L: ids.
        position_ids_L: int64 on the CPU, from 0 in every row.
        row_L: int32 on the CPU, -1 in padding.
        at_N: positions of tokens.

    Returns:
        The first three as ``[R, L]``, and the flat positions of ``at_N`` in them; one bin of padding if there are no rows.
    """
    positions, real = position_ids_L, row_L >= 0
    starts = (positions == 0) & real
    bins = torch.where(real, starts.cumsum(0) - 1, 0)
    count, longest = max(int(starts.sum()), 1), int(positions[real].max()) + 1 if real.any() else 1
    flat_index = (bins * longest + positions)[real]
    ids, rows = token_ids_L.new_zeros(count * longest), row_L.new_full((count * longest,), -1)
    ids[flat_index], rows[flat_index] = token_ids_L[real], row_L[real]
    padded = torch.arange(longest).repeat(count)
    at = bins[at_N] * longest + positions[at_N]
    return ids.view(count, -1), padded.view(count, -1), rows.view(count, -1), at


def packed_attention(  # the signature that transformers calls
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedRows | Tree | DividedRows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within rows, or within a tree. No dropout is applied.

    ``query`` is ``[R, H, L, D]``, ``key`` and ``value`` are ``[R, K, L, D]``; of `DividedRows` they are those of this rank's
    tokens. ``s_aux`` are the attention sinks ``[H]`` of gpt-oss: a score of each head that takes part in the softmax and has
    no value. Variable-length flash attention (`RowBounds`) has none.

    Returns:
        ``[R, L, H, D]`` and None, as transformers expects.

    Raises:
        ModelError: the model needs something of `_LACKING`.
    """
    assert attention_mask is None, "packed attention takes no mask"
    if sliding_window is None:  # some architectures put the window of a layer into the mask alone
        sliding_window = getattr(module, "sliding_window", None)
    for option in _LACKING:
        if options.get(option) is not None:
            raise ModelError(
                f"the model's attention wants {option}, which the fsdp learner lacks; choose another model.path"
            )
    if isinstance(packed, DividedRows):
        query, key, value = packed.context.to_heads(query, key, value)
        sinks = None if s_aux is None else packed.context.local_heads(s_aux)
        row_options: dict[str, Any] = {
            "packed": packed.rows,
            "scaling": scaling,
            "sliding_window": sliding_window,
            "s_aux": sinks,
        }
        return packed.context.to_tokens(packed_attention(module, query, key, value, None, **row_options)[0]), None
    if isinstance(packed, TreeRows | TreeMasks):
        return attend_tree(query, key, value, packed, scaling, sliding_window, s_aux), None
    if isinstance(packed, RowBounds):
        assert s_aux is None, "variable-length flash attention has no sinks"
        return flash_attention(query, key, value, packed, scaling, sliding_window), None
    bins, heads, length, _ = query.shape
    flat = [x.transpose(1, 2).reshape(bins * length, x.shape[1], -1) for x in (query, key, value)]
    outputs = []
    for index, n, t in packed.groups:
        q, k, v = (x.index_select(0, index).view(n, t, *x.shape[1:]).transpose(1, 2) for x in flat)
        if packed.batch_invariant:
            outputs += _batch_invariant_rows(q, k, v, scaling or q.shape[-1] ** -0.5, sliding_window)
            continue
        outputs.append(_causal(q, k, v, scaling, sliding_window, s_aux).transpose(1, 2).reshape(n * t, heads, -1))
    nothing = value.new_zeros(1, heads, value.shape[-1])
    if not outputs:
        # Only padding. Other ranks reduce gradients of all weights, so this rank needs them too, as zeros.
        nothing = nothing + 0 * (query.sum() + key.sum() + value.sum())
        nothing = nothing if s_aux is None else nothing + 0 * s_aux.sum()
    attended = torch.cat([*outputs, nothing]).index_select(0, packed.back)
    return attended.view(bins, length, heads, -1), None


def _batch_invariant_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None
) -> list[torch.Tensor]:
    """Return causal attention ``[T, H, D]`` of each row, with keys laid out as in the engine's cache."""
    padding = (0, 0, 0, -k.shape[2] % KEYS)
    k, v = F.pad(k, padding).contiguous(), F.pad(v, padding).contiguous()
    return [batch_invariant_attention(*row, 0, scaling, window) for row in zip(q, k, v, strict=True)]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: RowBounds,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return `packed_attention` by torch's variable-length flash attention, which takes 16-bit values on GPUs only."""
    bins, heads, length, size = query.shape
    value_size = value.shape[-1]
    if value_size < size:
        value = F.pad(value, (0, size - value_size))  # it takes one size; those of latent attention differ
    q, k, v = (x.transpose(1, 2).reshape(bins * length, x.shape[1], size).to(value.dtype) for x in (query, key, value))
    if rows.by_cudnn and window is None and value_size == size == cudnn_attention.SIZE:
        by_cudnn = cudnn_attention.cudnn_attention(q, k, v, rows.starts, rows.longest, scaling)
        return by_cudnn.view(bins, length, heads, size)
    seen = (-1 if window is None else window - 1, 0)
    attended = varlen_attn(
        q, k, v, rows.starts, rows.starts, rows.longest, rows.longest, scale=scaling, window_size=seen, **_GROUPED
    )
    assert isinstance(attended, torch.Tensor)
    return attended.view(bins, length, heads, size)[..., :value_size]


def _causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return causal attention ``[N, H, T, D]`` of separate rows; each token sees at most the last ``window`` tokens."""
    length = q.shape[2]
    windowed = window is not None and length > window
    if windowed or sinks_H is not None or (q.device.type == "cpu" and length <= CPU_STORED_TOKENS):
        return blockwise_causal(q, k, v, scaling or q.shape[-1] ** -0.5, window, sinks_H)
    q, k = q.to(v.dtype), k.to(v.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)


def blockwise_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention in blocks of queries, each against the keys that it sees, at most the last ``window``.

    On a CPU this takes half the time of torch's kernel, whose backward pass is slow, especially in bfloat16. Scores and
    softmax are computed in at least float32, also under autocast; the product with the values in the values' dtype.
    """
    rows, heads, length, size = q.shape
    key_heads = k.shape[1]
    group_size = heads // key_heads
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        q = (q.to(exact) * scaling).reshape(rows * key_heads, group_size, length, size)
        k_t = k.to(exact).reshape(rows * key_heads, length, size).transpose(1, 2)
        v = v.reshape(rows * key_heads, length, -1)
        sinks = None if sinks_H is None else sinks_H.to(exact).view(1, key_heads, group_size, 1)
        outputs = []
        for first in range(0, length, CPU_BLOCK):
            last = min(first + CPU_BLOCK, length)
            start = 0 if window is None else max(0, first + 1 - window)
            hidden = torch.full((last - first, last - start), float("-inf"), dtype=exact, device=q.device)
            unseen = hidden.triu(1 + first - start)
            if window is not None:
                unseen = unseen + hidden.tril(first - start - window)
            block = q[:, :, first:last].reshape(rows * key_heads, group_size * (last - first), size)
            scores = torch.baddbmm(unseen.repeat(group_size, 1), block, k_t[:, :, start:last])
            if sinks is None:
                probabilities = scores.softmax(-1).to(v.dtype)
            else:
                sink = sinks.expand(rows, -1, -1, last - first).reshape(rows * key_heads, -1, 1)
                probabilities = softmax_with_sink(scores, sink).to(v.dtype)
            outputs.append((probabilities @ v[:, start:last]).view(rows * key_heads, group_size, last - first, -1))
        return torch.cat(outputs, 2).view(rows, heads, length, -1)


AttentionInterface.register(IMPLEMENTATION, packed_attention)
