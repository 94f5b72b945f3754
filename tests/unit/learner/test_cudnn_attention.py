"""Attention by cuDNN, whose plans are replaced by one that computes from the same bounds; and one compilation for all batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agentrl.learner import attention, cudnn_attention
from agentrl.learner.attention import RowBounds, packed_attention, packed_rows
from agentrl.learner.layers import compilation, prepare_forward

CPU = torch.device("cpu")


@dataclass
class FakePlan:
    """Computes what cuDNN does, row by row, and checks that the tensors are as its layouts say."""

    shape: Any
    backward: bool

    def run(self, tensors: Mapping[str, torch.Tensor], bounds: torch.Tensor) -> None:
        shape = self.shape
        lengths, *starts = bounds.unbind()
        first, *others = (
            rows // width
            for rows, width in zip(
                starts, (shape.heads * shape.size, shape.key_heads * shape.size, shape.heads), strict=True
            )
        )
        assert all(torch.equal(first, rows) for rows in others)
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        assert len(lengths) == shape.rows + 1
        assert int(lengths.max()) <= shape.longest
        assert int(lengths.sum()) <= shape.tokens
        for start, length in zip(first.tolist(), lengths[:-1].tolist(), strict=False):
            self._row(tensors, slice(start, start + length))

    def _row(self, tensors: Mapping[str, torch.Tensor], row: slice) -> None:
        group = self.shape.heads // self.shape.key_heads
        query, key, value = (tensors[name][row].transpose(0, 1) for name in ("query", "key", "value"))
        key, value = (x.repeat_interleave(group, 0) for x in (key, value))
        sees = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool).tril()
        scores = (query @ key.transpose(1, 2) * self.shape.scale).masked_fill(~sees, -torch.inf)
        weights = scores.softmax(-1)
        if not self.backward:
            tensors["attended"][row] = (weights @ value).transpose(0, 1)
            tensors["logarithms"][row] = scores.logsumexp(-1).T.float()
            return
        gradient = tensors["gradient"][row].transpose(0, 1)
        of_weights = gradient @ value.transpose(1, 2)
        of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * self.shape.scale
        tensors["query'"][row] = (of_scores @ key).transpose(0, 1)
        for name, of_heads in (
            ("key'", of_scores.transpose(1, 2) @ query),
            ("value'", weights.transpose(1, 2) @ gradient),
        ):
            tensors[name][row] = of_heads.unflatten(0, (-1, group)).sum(1).transpose(0, 1)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[int]], RowBounds]:
    """Return a function that returns the bounds of rows as for a GPU with cuDNN."""
    monkeypatch.setattr(cudnn_attention, "_plan", FakePlan)
    monkeypatch.setattr(cudnn_attention, "is_available", lambda device: True)
    return lambda lengths: attention._bounds(torch.cat([torch.arange(length) for length in lengths]), CPU)


def qkv(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    size = cudnn_attention.SIZE
    return [torch.randn(1, heads, tokens, size, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("lengths", [[5, 1, 9], [3] * 20])
def test_it_is_attention_within_rows(bounds: Callable[[list[int]], RowBounds], lengths: list[int]) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    groups = packed_rows(positions, torch.zeros_like(positions), CPU)
    results = []
    for packed in (bounds(lengths), groups):
        inputs = qkv(sum(lengths))
        attended, _ = packed_attention(torch.nn.Module(), *inputs, None, packed=packed)
        weights = torch.arange(attended.numel()).view_as(attended).cos()
        results.append([attended, *torch.autograd.grad((attended * weights).sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=1e-9)


class Layer(torch.nn.Linear):
    """Attention over the same states as queries, keys and values."""

    scaling = 0.3

    def forward(self, states: torch.Tensor, *, packed: RowBounds) -> torch.Tensor:
        heads = super().forward(states).unflatten(-1, (-1, cudnn_attention.SIZE)).transpose(1, 2)
        return packed_attention(self, heads, heads, heads, None, packed=packed, scaling=self.scaling)[0].flatten(2)


def test_layers_are_compiled_once_for_all_numbers_of_rows_and_tokens(
    bounds: Callable[[list[int]], RowBounds], graphs: list[bool]
) -> None:
    """Also for those that are equal to sizes of the model, here 128 and 256."""
    layers = [Layer(256, 256) for _ in range(2)]
    for layer in layers:
        layer.forward = prepare_forward(layer.forward, compiled=True, recompute="selective")
    for lengths in ([60, 68], [100], [3] * 40, [9, 1], [100, 156], [1] * 200):
        for has_gradients in (True, False):
            states = torch.randn(1, sum(lengths), 256, requires_grad=has_gradients)
            with torch.set_grad_enabled(has_gradients):
                for layer in layers:
                    states = layer(states, packed=bounds(lengths))
            if has_gradients:
                states.sum().backward()
        assert all(layer.weight.grad is not None for layer in layers)
    assert graphs == [True, False]
    assert compilation()["train/compile_s"] > 0
    assert compilation() == {}
