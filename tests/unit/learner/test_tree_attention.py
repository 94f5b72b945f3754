"""Attention over a prefix tree is that of each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from agentrl.batch.prefix_tree import PrefixTree, prefix_tree
from agentrl.learner import tree_attention
from agentrl.learner.tree_attention import attend_tree, tree_masks, tree_rows

FORKS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=6)
"""Rows as (row to fork from, tokens taken from it, new tokens)."""


def make_rows(forks: list[tuple[int, int, int]]) -> list[np.ndarray]:
    rows: list[np.ndarray] = [np.zeros(0, np.int64)]
    for number, (source, kept_tokens, new) in enumerate(forks):
        rows.append(np.concatenate([rows[source % len(rows)][:kept_tokens], np.arange(new) + 1000 * (number + 1)]))
    return rows


def make_qkv(length: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, heads, length, 8, dtype=dtype) for heads in (4, 2, 2)]


def alone(qkv: list[torch.Tensor], index: np.ndarray, scaling: float | None, window: int | None) -> torch.Tensor:
    """Return torch's attention of one row, ``[T, H, D]``."""
    far = torch.arange(len(index))[:, None] - torch.arange(len(index))
    mask = (far >= 0) & (far < (window or len(index) + 1))
    taken = [x[:, :, torch.from_numpy(index)] for x in qkv]
    return F.scaled_dot_product_attention(*taken, mask, scale=scaling, enable_gqa=True)[0].transpose(0, 1)


def paths(tree: PrefixTree, rows: list[np.ndarray]) -> list[np.ndarray]:
    return np.split(tree.index_N, np.cumsum([len(row) for row in rows])[:-1])


@pytest.mark.parametrize("stored", [1024, 10], ids=["stored", "kernel"])
@pytest.mark.parametrize(("scaling", "window"), [(None, None), (0.3, 7)])
@settings(max_examples=settings.default.max_examples // 2)  # each in four ways
@given(forks=FORKS, padding=st.integers(0, 3))
def test_rows_of_a_tree_have_the_attention_and_gradients_of_each_alone(scaling, window, stored, forks, padding):
    rows = make_rows(forks)
    tree = prefix_tree(rows)
    length = len(tree.token_ids_U) + padding
    qkv = [x.requires_grad_() for x in make_qkv(length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "CPU_STORED_TOKENS", stored)
        given_ = tree_rows(tree, [len(row) for row in rows], length)
        actual = attend_tree(*qkv, given_, scaling=scaling, sliding_window=window)[0]
    assert torch.equal(actual[len(tree.token_ids_U) :], torch.zeros(padding, 4, 8, dtype=torch.float64))
    loss, expected = 0 * actual.sum(), 0 * sum(x.sum() for x in qkv)
    for number, index in enumerate(paths(tree, rows)):
        row = alone(qkv, index, scaling, window)
        assert torch.allclose(actual[index], row, atol=1e-12)
        loss, expected = loss + number * actual[index].square().sum(), expected + number * row.square().sum()
    ours, theirs = (torch.autograd.grad(each, qkv) for each in (loss, expected))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(ours, theirs, strict=True))


def dense(tree: PrefixTree, length: int, window: int | None) -> torch.Tensor:
    """Return the whole mask."""
    end, depth = torch.arange(1, length + 1), torch.zeros(length, dtype=torch.int64)
    end[: len(tree.depth_U)], depth[: len(tree.depth_U)] = torch.tensor(tree.subtree_end_U), torch.tensor(tree.depth_U)
    ids = torch.arange(length)
    sees = (ids <= ids[:, None]) & (ids[:, None] < end)
    return sees if window is None else sees & (depth[:, None] - depth < window)


@pytest.mark.parametrize("window", [None, 20])
@given(forks=FORKS)
def test_blocks_of_flex_attention_hold_the_mask(window, forks):
    tree = prefix_tree(make_rows(forks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "FLEX_MULTIPLE", 8)
        length = -(-max(len(tree.depth_U), 1) // 8) * 8
        mask = tree_masks(tree, length, torch.device("cpu"), [window] if window else []).masks[window]
    expected = dense(tree, length, window)
    ids, zero = torch.arange(length), torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, ids[:, None], ids), expected)
    blocks = expected.unflatten(0, (-1, 8)).unflatten(2, (-1, 8)).transpose(1, 2)
    partial_blocks, every = blocks.any(-1).any(-1), blocks.all(-1).all(-1)
    partial, full = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    assert torch.equal(full, full & every)
    assert torch.equal(partial_blocks, partial_blocks & (partial | full))
    if window is None:
        assert torch.equal(partial_blocks, partial | full)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_mask():
    tree = prefix_tree(make_rows([(0, 0, 100), (1, 60, 50)]))
    mask = tree_masks(tree, 256, torch.device("cpu"), [40]).masks[40]
    q, k, v = make_qkv(256, torch.float32)
    actual = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, v, dense(tree, 256, 40), enable_gqa=True)
    assert torch.allclose(actual, expected, atol=1e-5)


def listed(number: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return lists of blocks as booleans."""
    blocks = torch.zeros(index.shape[-2:], dtype=torch.bool)
    for line, (count, indices) in enumerate(zip(number[0, 0], index[0, 0], strict=True)):
        blocks[line, indices[:count].long()] = True
    return blocks
