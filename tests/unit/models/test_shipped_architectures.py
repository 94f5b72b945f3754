"""Shipped architectures: their number of weights, and what transformers and the megatron learner make of them."""

import json
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.registry import read_family
from agentrl.models.shipped_architectures import find_architecture, meta_model, shipped_architectures

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": 1.54,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B-Instruct": 7.61,
    "Qwen/Qwen2.5-14B-Instruct": 14.7,
    "Qwen/Qwen2.5-32B-Instruct": 32.5,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "deepseek-ai/DeepSeek-V3": 671,
    "deepseek-ai/DeepSeek-V3.1": 671,
    "deepseek-ai/DeepSeek-R1": 671,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "moonshotai/Kimi-K2-Instruct": 1030,
    "moonshotai/Moonlight-16B-A3B-Instruct": 16,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "zai-org/GLM-4.5": 355,
    "zai-org/GLM-4.6": 355,
    "zai-org/GLM-4.7": 355,
    "zai-org/GLM-4.5-Air": 106,
    "zai-org/GLM-Z1-9B-0414": 9.4,
}
"""Billions of weights that the model's page or paper states, without layers for multi-token prediction."""


def test_every_shipped_architecture_is_in_the_table() -> None:
    assert {*shipped_architectures()} == {*PUBLISHED}


COUNTS: dict[str, int] = {}
"""Numbers of weights by the text of a configuration, which several models have in common."""


def count_weights(config: str, folder: Path) -> int:
    if config not in COUNTS:
        COUNTS[config] = sum(weight.numel() for weight in meta_model(folder).parameters())
    return COUNTS[config]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_weights_is_the_published_one(name: str) -> None:
    folder = find_architecture(name)
    assert count_weights((folder / "config.json").read_text(), folder) == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_megatron_learner_has_the_family(name: str) -> None:
    family, hf = read_family(find_architecture(name), "model.path")
    assert family.options(hf)["num_layers"] == hf.num_hidden_layers


def test_variants_have_one_architecture() -> None:
    shipped = shipped_architectures()
    assert find_architecture("Qwen/Qwen2.5-7B") == shipped["Qwen/Qwen2.5-7B-Instruct"]
    assert find_architecture("Qwen/Qwen3-8B-Base") == shipped["Qwen/Qwen3-8B"]
    assert find_architecture("moonshotai/Moonlight-16B-A3B") == shipped["moonshotai/Moonlight-16B-A3B-Instruct"]


def test_a_folder_comes_before_what_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 1}))
    assert find_architecture(str(tmp_path)) == tmp_path


def test_an_unknown_model_lists_what_is_shipped() -> None:
    with pytest.raises(ModelError, match=r"model\.path=some/other-9B.*Qwen/Qwen3-8B"):
        find_architecture("some/other-9B")


def test_what_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(ModelError, match="no_such_family"):
        meta_model(tmp_path)
