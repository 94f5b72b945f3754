"""Attention over a prefix tree (`agentrl.batch.prefix_tree`): every token sees its ancestors and itself.

On GPUs this is flex attention with masks of blocks. On CPUs each row's own tokens attend to the gathered keys of the row,
in padded groups of similar rows: the tokens that a row shares with an earlier one are queries only there.

Legend: ``L`` tokens of the tree, padding included, ``H`` query heads, ``K`` key heads, ``D`` head size; in a group ``N``
rows, ``Q`` own tokens and ``T`` tokens of the longest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.batch.microbatch import MicroBatch, to_device
from agentrl.batch.prefix_tree import PrefixTree, key_ids, prefix_tree, token_keys
from agentrl.core.experts import unknown_expert_mask, unknown_experts
from agentrl.learner.layers import record_compilation

FLEX_MULTIPLE = 128
"""Length of the blocks of flex attention."""
LENGTH_RATIO = 1.5
"""Maximum ratio of lengths in one group, which bounds the padding."""
CPU_BLOCK = 64
"""Queries per block on a CPU; fastest of 32 to 200 on rows of 400 tokens."""
CPU_STORED_TOKENS = 1024
"""Longer rows use torch's own CPU kernel, which stores no scores: it is slower, but needs less memory."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of similar length, with a similar number of own tokens."""

    query_N_Q: torch.Tensor
    """int64 indices of the rows' own tokens; padding repeats the last."""
    depth_N_Q: torch.Tensor
    """int64 positions of these in their rows."""
    key_N_T: torch.Tensor
    """int64 indices of all tokens of the rows; padding repeats the last."""


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A tree for CPUs."""

    groups: tuple[RowGroup, ...]
    """Groups of rows that have own tokens."""
    back_L: torch.Tensor
    """int64: each token's index in the groups' concatenated queries; padding has the index after their end."""


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """A tree for flex attention."""

    masks: Mapping[int | None, BlockMask]
    """By size of the sliding window; None is without one."""


Tree = TreeRows | TreeMasks


def tree_rows(tree: PrefixTree, rows: Collection[int], length: int) -> TreeRows:
    """Return ``tree``, padded to ``length`` tokens, for attention on CPUs.

    Args:
        tree: of rows.
        rows: tokens of each row.
        length: at least the tree's tokens.
    """
    paths = np.split(tree.index_N, np.cumsum([*rows])[:-1]) if rows else []
    owned = [path[shared:] for path, shared in zip(paths, tree.shared, strict=True)]
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (path, own_tokens) in enumerate(zip(paths, owned, strict=True)):
        if len(own_tokens):
            alike[_size_class(len(own_tokens)), _size_class(len(path))].append(number)
    groups: list[RowGroup] = []
    back = np.empty(length, np.int64)
    placed = 0
    for numbers in alike.values():
        query, key = (_pad_rows([indices[number] for number in numbers]) for indices in (owned, paths))
        for line, number in enumerate(numbers):
            first = placed + line * query.shape[1]
            back[owned[number]] = np.arange(first, first + len(owned[number]))
        placed += query.size
        groups.append(RowGroup(*(torch.from_numpy(array) for array in (query, tree.depth_U[query], key))))
    back[len(tree.token_ids_U) :] = placed
    return TreeRows(tuple(groups), torch.from_numpy(back))


def _size_class(length: int) -> int:
    """Return a number that lengths share only if their ratio is at most ``LENGTH_RATIO``."""
    return int(math.log(length, LENGTH_RATIO))


def _pad_rows(rows: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return ``rows`` as one array; each is padded with its last element."""
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])


def tree_masks(tree: PrefixTree, length: int, device: torch.device, windows: Collection[int] = ()) -> TreeMasks:
    """Return ``tree``, padded to ``length`` tokens, a multiple of ``FLEX_MULTIPLE``, for flex attention on ``device``.

    Args:
        tree: of rows.
        length: at least the tree's tokens. Padding sees itself alone.
        device: of the attention.
        windows: sizes of the model's sliding windows.
    """
    return _masks(tree.subtree_end_U, tree.depth_U, length, device, windows)


def row_masks(position_ids_L: torch.Tensor, device: torch.device, windows: Collection[int] = ()) -> TreeMasks:
    """Return packed rows, which share no prefixes, for flex attention; a row starts at each position 0.

    Args:
        position_ids_L: int64 on the CPU.
        device: of the attention.
        windows: sizes of the model's sliding windows.
    """
    depth = position_ids_L.numpy()
    starts = np.flatnonzero(depth == 0)
    stops = np.append(starts[1:], len(depth))
    length = -(-len(depth) // FLEX_MULTIPLE) * FLEX_MULTIPLE
    return _masks(np.repeat(stops, stops - starts), depth, length, device, windows)


def _masks(
    end: NDArray[np.int64], depth: NDArray[np.int64], length: int, device: torch.device, windows: Collection[int]
) -> TreeMasks:
    """Return the masks of tokens that are seen by those before ``end``, with padding up to ``length`` that sees itself."""
    ends, depths = np.arange(1, length + 1), np.zeros(length, np.int64)
    ends[: len(end)], depths[: len(depth)] = end, depth
    end_L, depth_L = (to_device(torch.from_numpy(array.astype(np.int32)), device) for array in (ends, depths))
    return TreeMasks({window: _block_mask(end_L, depth_L, window) for window in (None, *windows)})


def _block_mask(end_L: torch.Tensor, depth_L: torch.Tensor, window: int | None) -> BlockMask:
    """Return the mask of ``k <= q < end[k]``, within a sliding window."""
    number = torch.arange(len(end_L) // FLEX_MULTIPLE, device=end_L.device)
    (end_low, end_high), (low, high) = (x.view(-1, FLEX_MULTIPLE).aminmax(dim=1) for x in (end_L, depth_L))
    query, key = number[:, None], number
    any_visible = (key <= query) & (query * FLEX_MULTIPLE < end_high)
    all_visible = (key < query) & ((query + 1) * FLEX_MULTIPLE <= end_low)

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end_L[k])

    if window is not None:
        size, below = window, sees
        any_visible &= low[:, None] - high < size
        all_visible &= high[:, None] - low < size

        def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return below(b, h, q, k) & (depth_L[q] - depth_L[k] < size)

    (partial, partial_index), (full, full_index) = _list_blocks(any_visible & ~all_visible), _list_blocks(all_visible)
    return BlockMask.from_kv_blocks(partial, partial_index, full, full_index, BLOCK_SIZE=FLEX_MULTIPLE, mask_mod=sees)


def _list_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of blocks in each line ``[1, 1, lines]``, and a line of indices that begins with theirs."""
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


@dataclass(frozen=True, slots=True)
class TreeInput:
    """A micro-batch as a tree, and the tokens to score: ``M`` of the tree for ``N`` of the rows."""

    token_ids_L: torch.Tensor
    """int64 on the CPU; padding holds 0."""
    position_ids_L: torch.Tensor
    """int64 positions in the rows, on the CPU; 0 in padding."""
    tree: Tree
    """For `attend_tree`, on the model's device."""
    before_M: torch.Tensor
    """int64 index of the token before each token to score, on the model's device."""
    targets_M: torch.Tensor
    """int64 ids of the tokens to score, on the model's device."""
    scored_N: torch.Tensor
    """int64 index among the ``M`` of each token of the rows to score, on the model's device."""
    experts_L: torch.Tensor | None
    """``[L, layers, K]`` on the CPU, as in `MicroBatch`; of tokens that rows share those of one of the rows."""
    index_N: torch.Tensor
    """int64 on the CPU: the tree's token of each token of the rows, one row after the other."""


def tree_places(
    micro: MicroBatch, places_N: torch.Tensor, device: torch.device, ranks: int
) -> tuple[torch.Tensor, int]:
    """Return places of a micro-batch in its tree, and the length of the tree; see `tree_input`."""
    tree = prefix_tree(_rows(micro))
    return torch.from_numpy(tree.index_N[places_N.numpy()]), _length(tree, device, ranks)


def _rows(micro: MicroBatch) -> list[NDArray[np.int64]]:
    """Return the rows' keys, which tell images apart."""
    used = int((micro.row_L >= 0).sum())
    starts = np.flatnonzero(micro.position_ids_L[:used].numpy() == 0)
    spans = [placed.span for placed in micro.images]
    keys = token_keys(micro.token_ids_L.numpy(), spans, sorted({span.digest for span in spans}))
    return np.split(keys[:used], starts[1:]) if used else []


def _length(tree: PrefixTree, device: torch.device, ranks: int) -> int:
    """Return the tokens of a padded tree: on GPUs at least two blocks, as code for one would be compiled separately."""
    if device.type == "cpu":
        multiple, least = ranks, 1
    else:
        multiple, least = math.lcm(ranks, FLEX_MULTIPLE), FLEX_MULTIPLE + 1
    return -(-max(len(tree.token_ids_U), least) // multiple) * multiple


def tree_input(
    micro: MicroBatch, at_N: torch.Tensor, device: torch.device, windows: Collection[int], ranks: int = 1
) -> TreeInput:
    """Return the prefix tree of a micro-batch.

    Args:
        micro: token ids, positions and rows, on the CPU.
        at_N: int64, positions of the tokens to score, never the first of a row.
        device: of the model.
        windows: sizes of the model's sliding windows.
        ranks: that compute equal parts of the tree.
    """
    rows = _rows(micro)
    tree = prefix_tree(rows)
    unique, length, token_ids_U = len(tree.token_ids_U), _length(tree, device, ranks), key_ids(tree.token_ids_U)
    token_N = tree.index_N[at_N.numpy()]
    scored_U, before_U = np.zeros(unique, np.bool_), np.empty(unique, np.int64)
    scored_U[token_N], before_U[token_N] = True, tree.index_N[at_N.numpy() - 1]
    scored = (before_U[scored_U], token_ids_U[scored_U], (np.cumsum(scored_U) - 1)[token_N])
    if micro.support is not None:  # rows that share a token may have sampled it from different ids
        scored = (tree.index_N[at_N.numpy() - 1], token_ids_U[token_N], np.arange(len(token_N)))
    token_ids_L, position_ids_L = (
        torch.from_numpy(np.pad(array, (0, length - unique))) for array in (token_ids_U, tree.depth_U)
    )
    before_M, targets_M, scored_N = (to_device(torch.from_numpy(array), device) for array in scored)
    packed: Tree
    if device.type == "cpu":
        packed = tree_rows(tree, [len(row) for row in rows], length)
    else:
        packed = tree_masks(tree, length, device, windows)
    experts_L = None if micro.experts_L is None else _experts(micro.experts_L, tree, length)
    index_N = torch.from_numpy(tree.index_N)
    return TreeInput(token_ids_L, position_ids_L, packed, before_M, targets_M, scored_N, experts_L, index_N)


def _experts(experts_N: torch.Tensor, tree: PrefixTree, length: int) -> torch.Tensor:
    """Return the experts of a padded tree's tokens; a token that rows share takes them from a row where they are known."""
    experts = experts_N.numpy()[: len(tree.index_N)]
    experts_L, is_known = unknown_experts(length, experts), ~unknown_expert_mask(experts)
    experts_L[tree.index_N[is_known]] = experts[is_known]
    return torch.from_numpy(experts_L)


_FLEX: Any = flex_attention  # one of its overloads returns more


@cache
def _compiled_flex() -> Any:
    """Return the kernel for calls from code that is not compiled itself."""
    record_compilation()
    return torch.compile(_FLEX)


def attend_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: Tree,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within a tree. ``query`` is ``[1, H, L, D]``, ``key`` and ``value`` ``[1, K, L, D]``; no dropout is applied.

    Returns:
        ``[1, L, H, D]``; zeros in padding on CPUs.
    """
    if isinstance(tree, TreeRows):
        return _attend_rows(query, key, value, tree, scaling, sliding_window, sinks_H)
    attend = _FLEX if torch.compiler.is_compiling() else _compiled_flex()
    mask, length = tree.masks[sliding_window], query.shape[2]
    if padding := mask.shape[-1] - length:
        query, key, value = (F.pad(states, (0, 0, 0, padding)) for states in (query, key, value))
    query, key = query.to(value.dtype), key.to(value.dtype)
    options = {"block_mask": mask, "scale": scaling, "enable_gqa": True}
    if sinks_H is None:
        attended: torch.Tensor = attend(query, key, value, **options)
    else:
        without_sinks, lse_H_L = attend(query, key, value, **options, return_lse=True)
        attended = _with_sinks(without_sinks, lse_H_L, sinks_H)
    return attended[:, :, :length].transpose(1, 2)


def _with_sinks(attended: torch.Tensor, lse_H_L: torch.Tensor, sinks_H: torch.Tensor) -> torch.Tensor:
    """Return attention ``[1, H, L, D]`` with a further score of each head in its softmax, from that without.

    ``lse_H_L`` are the logarithms of the softmax's denominators, ``[1, H, L]``.
    """
    share = (lse_H_L.float() - sinks_H.float()[:, None]).sigmoid()
    return attended * share[..., None].to(attended.dtype)


def softmax_with_sink(scores: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return the softmax ``[..., T]`` of scores and a sink ``[..., 1]``, without the sink's probability."""
    return torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: TreeRows,
    scaling: float | None,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of each row's own tokens to the row."""
    heads, size = query.shape[1], value.shape[-1]
    query_L, key_L, value_L = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs = []
    for group in tree.groups:
        q = _gather_heads(query_L, group.query_N_Q)
        k, v = (_gather_heads(x, group.key_N_T) for x in (key_L, value_L))
        attended = _in_blocks(q, k, v, group.depth_N_Q, scaling, window, sinks_H)
        outputs.append(attended.transpose(1, 2).reshape(-1, heads, size))
    nothing = value.new_zeros(1, heads, size)
    if not outputs:
        # Only padding. Other ranks reduce gradients of all weights, so this rank needs them too, as zeros.
        nothing = nothing + 0 * (query.sum() + key.sum() + value.sum())
        nothing = nothing if sinks_H is None else nothing + 0 * sinks_H.sum()
    return torch.cat([*outputs, nothing]).index_select(0, tree.back_L)[None]


def _gather_heads(x_L: torch.Tensor, index_N_T: torch.Tensor) -> torch.Tensor:
    """Return the heads at each index, ``[N, heads, T, D]``."""
    return x_L.index_select(0, index_N_T.reshape(-1)).view(*index_N_T.shape, *x_L.shape[1:]).transpose(1, 2)


def _in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    depth_N_Q: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return causal attention ``[N, H, Q, D]`` in blocks of queries, each against the keys that one of its queries sees.

    ``depth_N_Q`` is the index of each query's last key.
    """
    outputs = []
    stored = k.shape[2] <= CPU_STORED_TOKENS or sinks_H is not None
    for first in range(0, q.shape[2], CPU_BLOCK):
        depth = depth_N_Q[:, first : first + CPU_BLOCK, None]
        stop = int(depth.max()) + 1
        start = 0 if window is None else max(0, int(depth.min()) - window + 1)
        keys = torch.arange(start, stop)
        sees = keys <= depth if window is None else (keys <= depth) & (depth - keys < window)
        block = (q[:, :, first : first + CPU_BLOCK], k[:, :, start:stop], v[:, :, start:stop])
        if stored:
            outputs.append(_attend_stored(*block, sees, scaling or q.shape[-1] ** -0.5, sinks_H))
        else:
            q_block, k_block, v_block = block
            outputs.append(
                F.scaled_dot_product_attention(
                    q_block.to(v.dtype), k_block.to(v.dtype), v_block, sees[:, None], scale=scaling, enable_gqa=True
                )
            )
    return torch.cat(outputs, 2)


def _attend_stored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sees_N_Q_T: torch.Tensor,
    scaling: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention with a mask; scores and softmax are in at least float32, also under autocast."""
    rows, heads, length, size = q.shape
    key_heads = k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cpu", enabled=False):
        q = (q.to(exact) * scaling).reshape(rows, key_heads, -1, size)
        scores = (q @ k.to(exact).transpose(2, 3)).view(rows, key_heads, heads // key_heads, length, -1)
        scores = scores.masked_fill(~sees_N_Q_T[:, None, None], float("-inf"))
        if sinks_H is None:
            probabilities = scores.softmax(-1).to(v.dtype)
        else:
            probabilities = softmax_with_sink(scores, sinks_H.to(exact).view(1, key_heads, -1, 1, 1)).to(v.dtype)
        return (probabilities.view(rows, key_heads, -1, v.shape[2]) @ v).view(rows, heads, length, -1)
