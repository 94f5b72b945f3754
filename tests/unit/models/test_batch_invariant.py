"""Batch-invariant products and attention are right, have gradients, and do not depend on what is computed beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from agentrl.core.errors import ModelError
from agentrl.models.batch_invariant import (
    KEYS,
    BatchInvariantLinear,
    batch_invariant_attention,
    make_batch_invariant,
    tiled_product,
)
from agentrl.models.load import load_model
from tests.unit.learner.learners import make_model


@pytest.mark.parametrize("count", [1, 16, 37])
def test_a_tiled_product_and_its_gradients_are_those_of_the_product(count: int) -> None:
    torch.manual_seed(count)
    lines = torch.randn(count, 24, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(10, 24, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(count, 10, dtype=torch.float64)
    product = tiled_product(lines, weight)
    actual = torch.autograd.grad((product * factor).sum(), (lines, weight))
    expected = torch.autograd.grad((lines @ weight.t() * factor).sum(), (lines, weight))
    torch.testing.assert_close(product, lines @ weight.t())
    torch.testing.assert_close(actual, expected)


def test_a_line_has_the_same_product_beside_any_others() -> None:
    torch.manual_seed(0)
    lines, weight = torch.randn(40, 320), torch.randn(70, 320)
    together = tiled_product(lines, weight)
    for index in range(40):
        assert torch.equal(tiled_product(lines[index : index + 1], weight)[0], together[index])


@pytest.mark.parametrize("window", [None, 20])
def test_attention_is_causal_and_does_not_depend_on_where_it_begins(window: int | None) -> None:
    torch.manual_seed(1)
    count = KEYS + 30
    query = torch.randn(4, count, 8, requires_grad=True)
    key, value = (F.pad(torch.randn(2, count, 8), (0, 0, 0, -count % KEYS)).requires_grad_() for _ in range(2))
    attended = batch_invariant_attention(query, key, value, 0, 0.3, window)
    queries, keys = torch.arange(count)[:, None], torch.arange(count)
    seen = (keys <= queries) & (keys > queries - (window or count))
    expected = F.scaled_dot_product_attention(
        query, key[:, :count], value[:, :count], seen, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attended, expected)
    factor = torch.randn_like(attended)
    gradients = (torch.autograd.grad((out * factor).sum(), (query, key, value)) for out in (attended, expected))
    torch.testing.assert_close(*gradients)
    for first, last in ((3, 4), (count - 1, count), (KEYS - 5, KEYS + 20)):
        part = batch_invariant_attention(query[:, first:last], key, value, first, 0.3, window)
        assert torch.equal(part, attended[first:last])


def test_only_dense_models_are_batch_invariant(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path / "dense"))
    make_batch_invariant(model, "a.key")
    assert isinstance(model.get_output_embeddings(), BatchInvariantLinear)
    with pytest.raises(
        ModelError, match=r"^a\.key=true: model\.layers\.0\.mlp\.\S+ of Qwen3MoeForCausalLM is a .*leave out a\.key"
    ):
        make_batch_invariant(load_model(make_model(tmp_path / "experts", "qwen3_moe")), "a.key")
