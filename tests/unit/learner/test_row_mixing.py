"""Models whose layers mix packed rows: convolutions, Mamba, linear attention, RWKV. Each row counts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.batch.microbatch import MicroBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError
from agentrl.learner.attention import unpack_rows
from agentrl.learner.fsdp.loading import load_policy
from agentrl.learner.fsdp.model import PolicyModel

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
MIXING: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 32, **MAMBA, "mamba_n_heads": 4, "head_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 32},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "block_size": 8,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 8, "head_dim": 8,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
}  # fmt: skip


def packed(*rows: list[int], length: int) -> MicroBatch:
    """Rows one after the other, with padding to a multiple of ``length``."""
    tokens, positions, numbers = [], [], []
    for number, row in enumerate(rows):
        tokens, positions, numbers = tokens + row, positions + list(range(len(row))), numbers + [number] * len(row)
    pad = -len(tokens) % length
    tokens, positions, numbers = tokens + [0] * pad, positions + list(range(pad)), numbers + [-1] * pad
    made = [torch.tensor(values) for values in (tokens, positions, numbers)]
    zeros = torch.zeros_like(made[0])
    return MicroBatch(made[0], made[1], made[2].int(), zeros, zeros, zeros, zeros, zeros, zeros, zeros, ())


def scored(policy: PolicyModel, micro: MicroBatch) -> torch.Tensor:
    real = (micro.row_L >= 0) & (micro.position_ids_L > 0)
    return policy(micro, real.nonzero()[:, 0].numpy(), 1.0)[0]


def gradients(policy: PolicyModel, loss: torch.Tensor) -> list[torch.Tensor]:
    policy.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def model(root: Path, kind: str, sizes: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **sizes)).save_pretrained(root / kind)
    return root / kind


@pytest.mark.parametrize("kind", MIXING)
def test_packed_rows_count_as_if_each_was_alone(tmp_path: Path, kind: str) -> None:
    if kind == "falcon_h1" and transformers.__version__.startswith("5.12."):
        pytest.skip(
            "transformers 5.12 gives Falcon-H1's attention no keyword arguments, so that the learner refuses it"
        )
    policy = load_policy(
        model(tmp_path, kind, MIXING[kind]), LearnerConfig(precision="float32"), torch.device("cpu"), None
    )
    assert policy.separates_rows
    rows = [[5, 9, 2, 7, 1, 8], [3, 3, 4], [11, 2, 30, 40, 9], [63, 1]]
    together = scored(policy, packed(*rows, length=10))
    alone = torch.cat([scored(policy, packed(row, length=len(row))) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    weights = torch.linspace(0.5, 1.5, len(together))
    for actual, expected in zip(
        gradients(policy, (together * weights).sum()), gradients(policy, (alone * weights).sum()), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


def test_ranks_cannot_have_parts_of_rows_that_are_mixed(tmp_path: Path) -> None:
    config = LearnerConfig(precision="float32", ranks=2, context_parallel=2)
    with pytest.raises(
        ConfigError, match=r"learner\.context_parallel=2: layers of Lfm2.* \(model\.path=.*context_parallel=1"
    ):
        load_policy(model(tmp_path, "lfm2", MIXING["lfm2"]), config, torch.device("cpu"), None)


def test_a_model_of_attention_alone_keeps_its_packed_rows(tmp_path: Path) -> None:
    assert not load_policy(
        model(tmp_path, "llama", {}), LearnerConfig(precision="float32"), torch.device("cpu"), None
    ).separates_rows


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(9, 20))
def test_separated_rows_are_those_that_were_packed(lengths: list[int], length: int) -> None:
    """``a0 a1 b0 c0 . .`` becomes ``a0 a1 | b0 . | c0 .``."""
    rows = [[100 * number + at + 1 for at in range(size)] for number, size in enumerate(lengths)]
    micro = packed(*rows, length=length) if rows else packed([1], length=length)
    if not rows:
        micro.row_L.fill_(-1)
    real = (micro.row_L >= 0).nonzero()[:, 0]
    ids, positions, numbers, at = unpack_rows(micro.token_ids_L, micro.position_ids_L, micro.row_L, real)
    assert torch.equal(ids.flatten()[at], micro.token_ids_L[real])
    assert [row[numbers[index] >= 0].tolist() for index, row in enumerate(ids)] == (rows or [[]])
    assert torch.equal(positions, torch.arange(ids.shape[1]).expand_as(positions))
    assert numbers.shape == ids.shape
