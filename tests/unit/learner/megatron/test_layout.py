"""Layouts that do not divide a model or the ranks, with the fix in the message."""

from __future__ import annotations

import pytest

from agentrl.core.errors import ConfigError
from agentrl.learner.megatron.layout import Layout

MODEL = {
    "num_layers": 6, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 48, "vocab_size": 96,
}  # fmt: skip
EXPERTS = MODEL | {"num_moe_experts": 8, "moe_ffn_hidden_size": 16}
LATENT = MODEL | {"multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_pos_emb_head_dim": 9}
QWEN = MODEL | {"num_attention_heads": 28, "num_query_groups": 4}
CP = "context_parallel_size"
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"


@pytest.mark.parametrize(
    ("model", "options", "ranks", "message"),
    [
        (MODEL, {TP: 2, PP: 2}, 6, "=4 does not divide learner.ranks=6; set it to 1, 2, 3 or 6"),
        (MODEL, {TP: 3}, 3, f"{TP}=3 does not divide the model's num_attention_heads=8; set it to 1, 2, 4 or 8"),
        (MODEL | {"num_query_groups": 3}, {TP: 2}, 2, "neither divides the model's num_key_value_heads=3 nor"),
        (MODEL, {PP: 4}, 4, "does not divide the model's num_hidden_layers=6; set it to 1, 2, 3 or 6 or give"),
        (
            MODEL,
            {PP: 2, "virtual_pipeline_model_parallel_size": 2},
            2,
            "=4 does not divide the model's num_hidden_layers",
        ),
        (MODEL, {CP: 3}, 3, f"{CP}=3 does not divide the 8 attention heads of a rank"),
        (
            QWEN,
            {TP: 4, CP: 2},
            8,
            rf"{CP}=2 does not divide the 7 .*num_attention_heads=28 over .*{TP}=4\); set it to 1 or 7",
        ),
        (QWEN, {CP: 8}, 8, f"{CP}=8 does not divide the 28 attention heads"),
        (EXPERTS, {EP: 3}, 3, f"{EP}=3 does not divide the model's experts=8"),
        (EXPERTS, {TP: 2}, 2, f"{TP}=2 with experts needs learner.megatron.sequence_parallel=true"),
        (EXPERTS, {EP: 4}, 6, "=4 does not divide learner.ranks=6"),
        (
            EXPERTS | {"add_bias_linear": True},
            {TP: 2, "sequence_parallel": True},
            2,
            "expert_tensor_parallel_size=2: experts with biases are not divided; set .*=1",
        ),
        (LATENT, {TP: 2}, 2, r"does not divide the model's kv_lora_rank \+ qk_rope_head_dim=25"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(model: dict, options: dict, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.from_options(options).check(model, options, ranks)


def test_layouts_that_fit() -> None:
    for model, options, ranks in [
        (MODEL, {TP: 4, PP: 3}, 24),
        (EXPERTS, {TP: 2, "sequence_parallel": True, EP: 4, "expert_tensor_parallel_size": 1}, 8),
        (QWEN, {TP: 2, CP: 2}, 4),
        (QWEN, {CP: 4}, 8),
        (MODEL, {PP: 4, "num_layers_in_first_pipeline_stage": 3}, 4),
    ]:
        Layout.from_options(options).check(model, options, ranks)
    assert Layout.from_options({TP: 2, PP: 3, "context_parallel_size": 2}).ranks_per_replica == 12


def test_a_size_is_a_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match=rf"learner\.megatron\.{TP}=0 is not a number of ranks"):
        Layout.from_options({TP: 0})
