"""The estimate of a learner rank's memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from agentrl.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from agentrl.learner.fsdp.memory import FsdpMemory
from agentrl.learner.memory import LearnerMemory, MemoryOptions
from agentrl.models.load import empty_model
from agentrl.models.random_models import SHAPES, model_config
from tests.unit.learner.learners import Learners, make_batch

WEIGHTS_7B = 7_615_616_512
OF_8 = MemoryOptions(ranks=8, tokens=8192, bfloat16=True, recompute="selective", compiled=True)
GIB = 2**30


@pytest.fixture(scope="module")
def of_7b(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Qwen2.5-7B without weights."""
    folder: Path = tmp_path_factory.mktemp("7b")
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4}
    Qwen2Config(**sizes, **heads, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return empty_model(folder, "sdpa")


def test_a_7b_policy_on_8_ranks(of_7b):
    actual = FsdpMemory(of_7b)(LearnerConfig(reshard_after_forward=True), OF_8)
    assert actual.weights == pytest.approx(4 * WEIGHTS_7B / 8, rel=1e-3)
    assert actual.gradients == actual.weights
    assert actual.optimizer == 2 * actual.weights
    # A chunk's logits and their gradient, and the gradient of the head's weights so far.
    assert actual.logits == 4 * 152064 * (2 * LearnerConfig().logits_chunk + 3584)
    assert 20e9 < actual.total < 80e9
    assert actual.reference == 0


@pytest.mark.parametrize(
    ("size", "options", "measured_gib"),
    [
        ("0.6b", {"tokens": 16384}, 26.0),
        ("0.6b", {"tokens": 32768}, 37.8),
        ("0.6b", {"tokens": 16384, "recompute": "none"}, 32.4),
        ("4b", {"tokens": 12288, "recompute": "selective"}, 68.3),
        ("4b", {"tokens": 32768, "recompute": "all_but_attention"}, 53.9),
        ("4b", {"tokens": 32768, "recompute": "full", "accumulates": False}, 64.0),
        ("8b", {"tokens": 8192, "ranks": 2}, 103.9),
        ("8b", {"tokens": 12288, "ranks": 2}, 116.2),
    ],
)
def test_the_estimate_is_what_a_gpu_had_allocated(size: str, options: dict[str, Any], measured_gib: float):
    """``agentrl bench learner``; see docs/results.md. Micro-batches are a little smaller than their limit."""
    defaults: dict[str, Any] = {"ranks": 1, "bfloat16": True, "recompute": "selective", "compiled": True}
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(model_config(SHAPES[size]))
    state = "8bit" if size == "4b" and options["recompute"] != "full" else "float32"
    learner = LearnerConfig(optimizer=OptimizerConfig(state=state))
    actual = FsdpMemory(hf)(learner, MemoryOptions(**defaults | options)).total / GIB
    assert 1.0 < actual / measured_gib < 1.08


def test_a_copy_of_the_weights_is_sharded_over_its_ranks_alone(of_7b):
    copies = replace(OF_8, ranks=32, replicas=4)
    assert FsdpMemory(of_7b)(LearnerConfig(), copies) == FsdpMemory(of_7b)(LearnerConfig(), OF_8)


def test_a_rank_gathers_the_experts_that_it_computes():
    config = Qwen3MoeConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_experts=64,
        moe_intermediate_size=256,
        vocab_size=1000,
        mlp_only_layers=[0],
    )
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    plain, divided = (FsdpMemory(hf)(LearnerConfig(expert_parallel=size), OF_8) for size in (1, 8))
    experts = 64 * 3 * 256 * 256
    assert plain.gathered - divided.gathered == OF_8.size * 3 * experts * 7 // 8
    assert plain.weights == divided.weights


def test_what_needs_more_memory_is_estimated_to(of_7b):
    def total(options: dict[str, Any] | None = None, **learner: Any) -> int:
        return FsdpMemory(of_7b)(LearnerConfig(**learner), replace(OF_8, **options or {})).total

    usual = total()
    assert total({"recompute": "full"}) < usual < total({"recompute": "none"})
    assert total({"ranks": 16}) < usual < total({"tokens": 16384})
    assert total(reshard_after_forward=True) < usual < total({"bfloat16": False})
    assert usual < total({"reference": True})
    assert total(optimizer=OptimizerConfig(name="muon")) < usual
    assert total({"ranks": 1}) > 4 * usual / 3
    assert total({"accumulates": False}) < usual
    assert total({"compiled": False}) > usual
    plain = FsdpMemory(of_7b)(LearnerConfig(), OF_8)
    assert total(cpu_offload="optimizer") == plain.total - plain.optimizer


def test_gradients_of_one_micro_batch_appear_while_activations_are_freed(of_7b):
    """The peak is less than the sum of both, and not less than what the state or the activations need."""
    one_layer, several = (
        FsdpMemory(of_7b)(LearnerConfig(), replace(OF_8, accumulates=accumulates)) for accumulates in (False, True)
    )
    assert several.gradients == several.weights
    assert several.total - several.weights <= one_layer.total < several.total


def test_lora_trains_adapters_alone(of_7b):
    full_memory = FsdpMemory(of_7b)(LearnerConfig(), OF_8)
    frozen = copy.deepcopy(of_7b).requires_grad_(False)
    actual = FsdpMemory(frozen)(LearnerConfig(lora=LoraConfig(rank=8)), OF_8)
    adapters = 28 * 8 * sum((4 * 3584, 2 * (3584 + 512), 3 * (3584 + 18944))) * 4 // 8
    assert actual.weights - full_memory.weights == pytest.approx(adapters, rel=1e-3)
    assert actual.optimizer == 2 * actual.gradients == 2 * (actual.weights - full_memory.weights)
    assert actual.activations > full_memory.activations


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_state_is_what_a_rank_has(learners: Learners, name: str):
    rank = learners.open(name).rank
    learners.current.train_step(make_batch([20, 30]))
    options = MemoryOptions(ranks=1, tokens=64, bfloat16=False, recompute="none", compiled=False)
    actual: LearnerMemory = FsdpMemory(rank.model.hf)(rank.config, options)
    assert actual.weights == sum(parameter.nbytes for parameter in rank.model.parameters())
    moments = [
        t
        for optimizer in rank.optimizers.values()
        for state in optimizer.state.values()
        for t in state.values()
        if t.ndim
    ]
    assert actual.optimizer == sum(tensor.nbytes for tensor in moments)
    assert actual.gathered == 0


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_activations_are_what_autograd_keeps(learners: Learners, recompute: str):
    """Without compilation, selective recomputation keeps products in another place, where hooks do not see them."""
    rank = learners.open(precision="bfloat16", recompute=recompute).rank
    [[micro]] = make_batch([200], bin_=256, micro=256).micro
    hidden, kept_bytes = 32, dict[int, int]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in rank.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape[-1] == hidden and tensor.ndim == 3:
            kept_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores, _, _ = rank.model(micro, micro.mask_L.nonzero()[:, 0].numpy(), 1.0)
    # The inputs of two layers in float32; of the final norm, its input and what it scales.
    assert sum(kept_bytes.values()) == 4 * hidden * len(micro.token_ids_L) * (2 + 2)
    del scores
