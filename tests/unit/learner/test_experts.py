"""Experts of a rank: products with biases, and which models' experts can be divided."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from agentrl.core.errors import ConfigError
from agentrl.learner.fsdp.experts import divide_experts, expert_modules
from tests.unit.learner.learners import Learners, gradients, make_batch
from tests.unit.learner.megatron.models import make_model, model_config


class TwoRanks:
    """A mesh without ranks."""

    def size(self) -> int:
        return 2


def test_biases_of_experts_are_added_once_if_products_are_kept(tmp_path: Path, learners: Learners) -> None:
    folder = make_model(tmp_path / "model", "gpt_oss", num_hidden_layers=1)
    expected, actual = (
        gradients(learners.open(folder=folder, recompute=recompute), make_batch((14, 9)), torch.float32)
        for recompute in ("none", "selective")
    )
    assert float(expected["model.layers.0.mlp.experts.gate_up_proj_bias"].abs().max()) > 1e-4
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-5, atol=1e-7), name


def test_models_whose_experts_cannot_be_divided_are_refused() -> None:
    with torch.device("meta"):
        dense, mixture = (AutoModelForCausalLM.from_config(model_config(name)) for name in ("llama", "qwen3_moe"))
    with pytest.raises(
        ConfigError, match=r"learner\.expert_parallel=2: transformers fuses no experts of LlamaForCausalLM"
    ):
        divide_experts(dense, TwoRanks())
    expert_modules(mixture)[-1].norm = nn.LayerNorm(4, device="meta")
    with pytest.raises(ConfigError, match=r"expert_parallel=2: experts of Qwen3MoeForCausalLM .* share weights"):
        divide_experts(mixture, TwoRanks())
