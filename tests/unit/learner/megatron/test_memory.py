"""The estimate of a Megatron-Core rank's memory: counted by hand, against transformers, and in how layouts compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from agentrl.config.learner import Recompute
from agentrl.core.errors import ConfigError
from agentrl.learner.layer_memory import tower_bytes
from agentrl.learner.megatron.families.registry import FAMILIES, read_family
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.memory import MegatronWork, in_flight, megatron_memory, stage_layers
from agentrl.learner.memory import LearnerMemory, MemoryOptions
from agentrl.models.shipped_architectures import find_architecture, meta_model
from tests.vision_folders import write_processor_folder

HF = LlamaConfig(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=32,
    tie_word_embeddings=False,
)
MOE = Qwen3MoeConfig(
    hidden_size=8,
    intermediate_size=16,
    moe_intermediate_size=4,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=32,
)
QKV, OUT, MLP, NORMS = (4 + 2 + 2) * 4 * 8, 8 * 16, 3 * 8 * 16, 2 * 8
LAYER = QKV + OUT + MLP + NORMS
EMBEDDING = HEAD = 32 * 8
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def estimate(
    ranks: int = 1, tokens: int = 64, hf: Any = HF, bfloat16: bool = True, recompute: Recompute = "none", **options: Any
) -> LearnerMemory:
    family = FAMILIES["qwen3_moe" if hf is MOE else "llama"]
    return megatron_memory(family, hf, options, MegatronWork(ranks, tokens, 16, bfloat16, recompute=recompute))


def test_one_rank_has_everything() -> None:
    numbers = 4 * LAYER + EMBEDDING + HEAD + 8
    actual_estimate = estimate()
    assert (actual_estimate.weights, actual_estimate.gradients, actual_estimate.optimizer) == (
        2 * numbers,
        4 * numbers,
        12 * numbers,
    )
    assert actual_estimate.logits == 2 * 4 * 16 * 32
    actual_estimate = estimate(bfloat16=False)
    assert (actual_estimate.weights, actual_estimate.gradients, actual_estimate.optimizer) == (
        4 * numbers,
        4 * numbers,
        8 * numbers,
    )


def test_tensor_parallelism_divides_all_but_norms() -> None:
    numbers = 4 * ((LAYER - NORMS) // 2 + NORMS) + (EMBEDDING + HEAD) // 2 + 8
    actual_estimate = estimate(2, **TENSOR)
    assert (actual_estimate.weights, actual_estimate.gradients, actual_estimate.optimizer) == (
        2 * numbers,
        4 * numbers,
        12 * numbers,
    )
    assert actual_estimate.logits == 2 * 4 * 16 * 16


def test_pipeline_parallelism_divides_layers() -> None:
    actual_estimate = estimate(2, tokens=1, pipeline_model_parallel_size=2, recompute_granularity="full")
    assert actual_estimate.weights == 2 * (2 * LAYER + HEAD + 8), "the last stage, with the head and few activations"
    actual_estimate = estimate(2, tokens=1000, pipeline_model_parallel_size=2)
    assert actual_estimate.weights == 2 * (2 * LAYER + EMBEDDING), (
        "the first stage, with the activations of two micro-batches"
    )


def test_the_distributed_optimizer_divides_masters_and_moments() -> None:
    numbers = 4 * LAYER + EMBEDDING + HEAD + 8
    for options in ({}, {"context_parallel_size": 2}):
        actual_estimate = estimate(4, **options)
        assert (actual_estimate.weights, actual_estimate.gradients, actual_estimate.optimizer) == (
            2 * numbers,
            4 * numbers,
            3 * numbers,
        )
    assert estimate(4, use_distributed_optimizer=False).optimizer == 12 * numbers


def test_expert_parallelism_divides_experts() -> None:
    experts = 2 * 8 * 3 * 8 * 4
    dense = 2 * (QKV + OUT + NORMS + 2 * 4 + 8 * 8) + EMBEDDING + HEAD + 8
    assert estimate(2, hf=MOE).weights == 2 * (dense + experts)
    actual_estimate = estimate(4, hf=MOE, expert_model_parallel_size=2)
    assert actual_estimate.weights == 2 * (dense + experts // 2)
    assert actual_estimate.optimizer == 12 * (dense // 4 + experts // 2 // 2), (
        "experts have two replicas, the rest four"
    )


def test_activations_by_hand() -> None:
    attention = (4 + 2 + 2) * 4 + (4 + 2) * 4 + 4 * 4
    layer, working = 4 * 8 + attention + 3 * 16, 2 * 8 + 3 * 16
    assert estimate().activations == 2 * 64 * (4 * layer + working)
    again = {"recompute_granularity": "full", "recompute_num_layers": 1}
    assert estimate(**again).activations == 2 * 64 * (4 * 8 + layer + working)
    assert estimate(2, **again, context_parallel_size=2).activations == 2 * 32 * (4 * 8 + layer + working)
    halves = 2 * 64 * (4 * layer // 2 + working // 2)
    assert estimate(2, **TENSOR).activations == halves, "with sequence parallelism all of it is divided"
    assert estimate(2, tensor_model_parallel_size=2).activations > halves
    assert estimate(recompute="full").activations == estimate(**again).activations
    products = 2 * 8 + (4 + 2 + 2) * 4 + 4 * 4 + 2 * 16
    assert estimate(recompute="selective").activations == 2 * 64 * (4 * products + layer - products + working)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "zai-org/GLM-Z1-9B-0414"])
def test_one_rank_has_as_many_weights_as_transformers(name: str) -> None:
    family, hf = read_family(find_architecture(name), "model.path")
    actual = megatron_memory(family, hf, {}, MegatronWork(1, 64, 64))
    assert actual.weights == 2 * sum(weight.numel() for weight in meta_model(find_architecture(name)).parameters())


def test_moments_in_cpu_memory_are_not_counted() -> None:
    family, hf = read_family(find_architecture("Qwen/Qwen3-4B"), "model.path")
    usual, offloaded = (
        megatron_memory(family, hf, {}, MegatronWork(1, 64, 64, offloads=offloads)) for offloads in (False, True)
    )
    assert usual.optimizer == 3 * offloaded.optimizer == 3 * 2 * usual.weights
    assert usual.total - offloaded.total == usual.optimizer - offloaded.optimizer


@pytest.mark.parametrize("name", ["zai-org/GLM-4.5", "deepseek-ai/DeepSeek-V3"])
def test_routers_have_a_bias_that_transformers_does_not_count(name: str) -> None:
    family, hf = read_family(find_architecture(name), "model.path")
    actual = megatron_memory(family, hf, {}, MegatronWork(1, 64, 64))
    biases = (hf.num_hidden_layers - hf.first_k_dense_replace) * hf.n_routed_experts
    numbers = sum(weight.numel() for weight in meta_model(find_architecture(name)).parameters())
    assert actual.weights == 2 * (numbers + biases)


def test_more_ranks_never_need_more_memory_a_rank() -> None:
    family, hf = read_family(find_architecture("zai-org/GLM-4.5-Air"), "model.path")
    options = {"recompute_granularity": "full"}
    for name in ("expert_model_parallel_size", "context_parallel_size", ""):
        totals = []
        for ranks in (8, 16, 32, 64):
            more = {name: ranks // 8} if name else {}
            totals.append(megatron_memory(family, hf, options | more, MegatronWork(ranks, 8192, 4096)).total)
        assert totals == sorted(totals, reverse=True), name


def test_a_longer_pipeline_needs_less() -> None:
    family, hf = read_family(find_architecture("Qwen/Qwen3-32B"), "model.path")
    options = {"recompute_granularity": "full"}
    totals = [
        megatron_memory(family, hf, options | {"pipeline_model_parallel_size": size}, MegatronWork(8, 8192, 4096)).total
        for size in (1, 2, 4, 8)
    ]
    assert totals == sorted(totals, reverse=True)


def test_layers_of_stages() -> None:
    two = Layout(pipeline_model_parallel_size=2)
    assert stage_layers(4, two, {}) == [[0, 1], [2, 3]]
    assert stage_layers(5, two, {"num_layers_in_last_pipeline_stage": 2}) == [[0, 1, 2], [3, 4]]
    virtual = Layout(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert stage_layers(4, virtual, {}) == [[0, 2], [1, 3]]
    with pytest.raises(ConfigError, match="pipeline_model_parallel_layout"):
        stage_layers(4, two, {"pipeline_model_parallel_layout": "Et|tttL"})
    with pytest.raises(ConfigError, match="have 2, 5 layers, and the model 4"):
        stage_layers(4, two, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 5})


def test_micro_batches_in_flight() -> None:
    assert [in_flight(Layout(pipeline_model_parallel_size=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    virtual = Layout(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    assert [in_flight(virtual, stage) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_a_layout_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.megatron\.tensor_model_parallel_size"):
        estimate(3, tensor_model_parallel_size=3)


def test_the_first_stage_has_the_vision_tower(tmp_path: Path) -> None:
    folder = write_processor_folder(tmp_path, "qwen2.5-vl")
    numbers = sum(parameter.numel() for parameter in meta_model(folder).parameters())
    work = MegatronWork(1, 64, 16)
    assert megatron_memory(*read_family(folder, "model.path"), {}, work).weights == 2 * numbers


def test_a_trained_tower_keeps_activations_of_each_micro_batch_in_flight(tmp_path: Path) -> None:
    """As if all tokens of the micro-batch stood for images, on each context-parallel rank."""
    folder = write_processor_folder(tmp_path, "qwen2.5-vl")
    family = read_family(folder, "model.path")

    def activations(ranks: int, freeze: tuple[str, ...] = (), **options: Any) -> int:
        return megatron_memory(*family, options, MegatronWork(ranks, 1024, 16, freeze=freeze)).activations

    memory_options = MemoryOptions(2, 1024, bfloat16=True, recompute="none", compiled=False)
    tower, _ = tower_bytes(meta_model(folder), memory_options)
    blocks, patches, hidden, middle = 2, 4 * 1024, 32, 64
    # At least both norms' inputs and results, queries, keys, values, the result of attention, and the MLP's three.
    assert tower >= blocks * patches * 2 * (4 * hidden + 4 * hidden + 3 * middle)
    for ranks, options, times in (
        (2, {}, 1),
        (2, {"pipeline_model_parallel_size": 2}, 2),
        (2, {"context_parallel_size": 2}, 1),
    ):
        assert activations(ranks, **options) - activations(ranks, ("*visual.*",), **options) == times * tower
