"""The estimate of a learner rank's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.memory import LearnerMemory, learner_memory
from agentrl.models.load import empty_model
from agentrl.models.random_models import SHAPES, model_config
from tests.unit.learner.learners import Learners, make_batch

WEIGHTS_7B = 7_615_616_512
OF_8 = {"ranks": 8, "tokens": 8192, "bfloat16": True, "recompute": "selective", "compiled": True}


@pytest.fixture(scope="module")
def of_7b(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Qwen2.5-7B without weights."""
    folder: Path = tmp_path_factory.mktemp("7b")
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    Qwen2Config(**sizes, **heads, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return empty_model(folder, "sdpa")


def test_a_7b_policy_on_8_ranks(of_7b):
    found = learner_memory(of_7b, LearnerConfig(reshard_after_forward=True), **OF_8)
    assert found.weights == pytest.approx(4 * WEIGHTS_7B / 8, rel=1e-3)
    assert found.gradients == found.weights
    assert found.optimizer == 2 * found.weights
    assert found.logits == 3 * 4 * LearnerConfig().logits_chunk * 152064
    assert 20e9 < found.total < 80e9
    assert found.reference == 0


@pytest.mark.parametrize(("size", "measured_gib"), [("0.6b", 25.8), ("4b", 101.8)])
def test_the_estimate_is_within_15_percent_of_what_an_h200_had_allocated(size: str, measured_gib: float):
    """``agentrl bench learner batch.tokens_per_micro=16384``; see docs/results.md."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(model_config(SHAPES[size]))
    options = {"ranks": 1, "tokens": 16384, "bfloat16": True, "recompute": "selective", "compiled": True}
    assert learner_memory(hf, LearnerConfig(), **options).total / 2**30 == pytest.approx(measured_gib, rel=0.15)


def test_what_needs_more_memory_is_estimated_to(of_7b):
    def total(options: dict[str, object] | None = None, **learner: object) -> int:
        return learner_memory(of_7b, LearnerConfig(**learner), **OF_8 | (options or {})).total

    usual = total()
    assert total({"recompute": "full"}) < usual < total({"recompute": "none"})
    assert total({"ranks": 16}) < usual < total({"tokens": 16384})
    assert total(reshard_after_forward=True) < usual < total({"bfloat16": False})
    assert usual < total({"reference": True})
    assert total(optimizer=OptimizerConfig(name="muon")) < usual
    assert total({"ranks": 1}) > 4 * usual / 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_is_what_a_rank_has(learners: Learners, name: str):
    rank = learners.open(name).rank
    learners.current.train_step(make_batch([20, 30]))
    options = {"ranks": 1, "tokens": 64, "bfloat16": False, "recompute": "none", "compiled": False}
    found: LearnerMemory = learner_memory(rank.model.hf, rank.config, **options)
    assert found.weights == sum(parameter.nbytes for parameter in rank.model.parameters())
    moments = [t for one in rank.optimizers for state in one.state.values() for t in state.values() if t.ndim]
    assert found.optimizer == sum(tensor.nbytes for tensor in moments)
    assert found.gathered == 0
