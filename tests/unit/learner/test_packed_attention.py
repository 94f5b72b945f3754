"""Rows of a bin must not see each other, and cost no accuracy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ModelError
from agentrl.learner import attention
from agentrl.learner.attention import blockwise_causal, packed_attention, packed_rows
from agentrl.learner.fsdp.loading import load_policy
from tests.unit.learner.learners import MODELS, make_batch, make_model

CPU = torch.device("cpu")


def qkv(*lead: int, heads: int = 4, shared: int = 2, size: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(1)
    rows, length = lead
    return [torch.randn(rows, h, length, size, dtype=torch.float64) for h in (heads, heads // shared, heads // shared)]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3), st.integers(0, 3))
def test_packed_attention_equals_each_row_alone(bins, padding):
    length = max(sum(rows) for rows in bins) + padding
    positions = torch.zeros(len(bins), length, dtype=torch.int64)
    row = torch.full((len(bins), length), -1)
    spans = []
    for number, rows in enumerate(bins):
        start = 0
        for size in rows:
            positions[number, start : start + size] = torch.arange(size)
            row[number, start : start + size] = len(spans)
            spans.append((number, slice(start, start + size)))
            start += size
        positions[number, start:] = torch.arange(length - start)
    q, k, v = qkv(len(bins), length)
    actual_attention, _ = packed_attention(torch.nn.Module(), q, k, v, None, packed=packed_rows(positions, row, CPU))
    for number, span in spans:
        alone = F.scaled_dot_product_attention(
            *(x[number : number + 1, :, span] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        assert torch.allclose(actual_attention[number, span], alone[0].transpose(0, 1), atol=1e-12)
    assert torch.equal(actual_attention[row < 0], torch.zeros_like(actual_attention[row < 0]))


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_blockwise_attention_and_its_gradient_equal_torchs(length):
    inputs = [x.requires_grad_() for x in qkv(3, length)]
    blockwise = blockwise_causal(*inputs, 0.3)
    full_output = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    assert torch.allclose(blockwise, full_output, atol=1e-12)
    weights = torch.randn_like(full_output)
    ours = torch.autograd.grad((blockwise * weights).sum(), inputs)
    theirs = torch.autograd.grad((full_output * weights).sum(), inputs)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_long_rows_take_torchs_kernel_and_give_the_same(monkeypatch):
    q, k, v = qkv(2, 100)
    packed = packed_rows(torch.arange(100).repeat(2, 1), torch.tensor([0, 1])[:, None].expand(2, 100), CPU)
    blockwise, _ = packed_attention(torch.nn.Module(), q, k, v, None, packed=packed)
    monkeypatch.setattr(attention, "CPU_STORED_TOKENS", 50)
    kernel, _ = packed_attention(torch.nn.Module(), q, k, v, None, packed=packed)
    assert torch.allclose(blockwise, kernel, atol=1e-12)


def test_a_sliding_window_is_kept():
    q, k, v = qkv(1, 30)
    packed = packed_rows(torch.arange(30)[None], torch.zeros(1, 30, dtype=torch.int64), CPU)
    actual, _ = packed_attention(torch.nn.Module(), q, k, v, None, packed=packed, sliding_window=4)
    ids = torch.arange(30)
    seen = (ids[:, None] >= ids) & (ids[:, None] - ids < 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert torch.allclose(actual, expected.transpose(1, 2), atol=1e-12)


def test_rows_of_very_different_lengths_are_not_padded_to_the_longest():
    lengths = [400, 20, 20, 20, 20, 20]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    packed = packed_rows(positions, row, CPU)
    assert sorted((n, t) for _, n, t in packed.groups) == [(1, 400), (5, 20)]


@pytest.mark.parametrize("option", ["softcap", "sinks", "position_bias", "indices", "block_indices"])
def test_what_the_learner_lacks_is_refused(option):
    q, k, v = qkv(1, 4)
    packed = packed_rows(torch.arange(4)[None], torch.zeros(1, 4, dtype=torch.int64), CPU)
    with pytest.raises(ModelError, match=rf"{option}.*model\.path"):
        packed_attention(torch.nn.Module(), q, k, v, None, packed=packed, **{option: 30.0})


@pytest.mark.parametrize("family", sorted(MODELS))
def test_packed_logprobs_equal_a_plain_forward_of_each_row(tmp_path, family):
    folder = make_model(tmp_path / family, family)
    policy = load_policy(folder, LearnerConfig(precision="float32", logits_chunk=7), torch.device("cpu"), None)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = make_batch([30, 50, 20, 7, 60, 33], bin_=256, micro=256)
    [micro] = batch.micro[0]
    row = micro.row_L
    at = ((row >= 0) & (micro.position_ids_L > 0)).nonzero()[:, 0]
    actual_policy, entropy, _ = policy(micro, at.numpy(), 0.7, entropy=True)
    assert len(micro.keys) == 6
    for number in range(6):
        ids = micro.token_ids_L[row == number]
        scores = (plain(ids[None]).logits[0].double() / 0.7).log_softmax(-1)[:-1]
        of_sequence = row[at] == number
        assert torch.allclose(actual_policy[of_sequence].double(), scores.gather(1, ids[1:, None])[:, 0], atol=2e-5)
        assert torch.allclose(entropy[of_sequence].double(), -(scores.exp() * scores).sum(-1), atol=2e-5)


def test_an_architecture_that_changes_logits_after_the_head_is_refused(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "m")
    full_forward = Qwen3ForCausalLM.forward

    def scaled(self, *args, **options):
        output = full_forward(self, *args, **options)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", scaled)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM changes logits"):
        load_policy(folder, LearnerConfig(precision="float32"), torch.device("cpu"), None)


def test_a_head_that_does_more_than_a_product_is_refused(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "m")
    full_init = Qwen3ForCausalLM.__init__

    def with_scaled_head(self, config):
        full_init(self, config)
        product = self.lm_head.forward
        self.lm_head.forward = lambda hidden: product(hidden) * 0.5

    monkeypatch.setattr(Qwen3ForCausalLM, "__init__", with_scaled_head)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM changes logits"):
        load_policy(folder, LearnerConfig(precision="float32"), torch.device("cpu"), None)
