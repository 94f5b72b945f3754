"""Experts, which transformers fuses into one weight a layer, are exported, saved and loaded as in Hugging Face folders."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.core.errors import ModelError
from agentrl.inference.embedded.model import Model
from agentrl.models.hub_tensors import hub_tensors
from agentrl.models.weight_checksum import tensor_checksum
from agentrl.weight_sync.engines import Checksums
from tests.unit.learner.learners import tensors
from tests.unit.learner.megatron.models import add_draft_layer, make_model

FILE = Path("model", "model.safetensors")
EXPERT = "model.layers.2.mlp.experts.3.{}_proj.weight"


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_sync_and_a_checkpoint_have_the_tensors_of_the_folder(learners, tmp_path, caplog, family):
    folder = add_draft_layer(make_model(tmp_path / family, family))
    expected = load_file(folder / FILE.name)
    drafts = {name: expected.pop(name) for name in list(expected) if ".eh_proj." in name}
    assert {EXPERT.format(projection) for projection in ("gate", "up", "down")} < expected.keys()
    with caplog.at_level(logging.WARNING):
        learner = learners.open(folder=folder)
        actual = tensors(learner)
        learner.save(tmp_path / "saved")
        learner.finish_save()
        learner.load(tmp_path / "saved")
    assert "loads the whole model" not in caplog.text
    saved = load_file(tmp_path / "saved" / FILE)
    assert actual.keys() == expected.keys(), "also the biases of routers, which are no parameters"
    assert torch.equal(saved.pop("model.layers.4.eh_proj.weight"), *drafts.values()), "not trained, and kept"
    assert saved.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in (actual | saved).items())
    assert all(torch.equal(tensor, actual[name]) for name, tensor in tensors(learner).items())
    small = {name: tensor.clone() for bucket in learner.buckets(1) for name, tensor in bucket.tensors()}
    assert all(torch.equal(tensor, actual[name]) for name, tensor in small.items())


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_the_embedded_engine_takes_experts_one_by_one(learners, tmp_path, family):
    """From a sync, and from a folder; what it reports is what was sent."""
    folder = make_model(tmp_path / "model", family)
    model = Model(folder, torch.float32, 2, 32)
    old = load_file(folder / FILE.name)
    new = {name: tensor + 1 for name, tensor in tensors(learners.open(folder=folder)).items()}
    sums = Checksums(["sha256"])
    sums.add(list(new.items()))
    assert sums.difference(checksums(model)) is not None
    model.load_weights(list(new.items()))
    assert sums.difference(checksums(model)) is None
    assert dict(model.parameters()).keys() == new.keys()
    model.load_folder(folder)
    assert checksums(model)[EXPERT.format("up")] == tensor_checksum(old[EXPERT.format("up")])


def test_a_sync_restores_biases_of_routers_whose_memory_an_engine_released(learners, tmp_path):
    """They are no parameters of transformers; whatever the dtype of the weights they are sent in float32."""
    folder = make_model(tmp_path / "model", "glm4_moe")
    saved = load_file(folder / FILE.name)
    model = Model(folder, torch.float32, 2, 32)
    model.release_weights()
    model.allocate_weights()
    biases = {name for name in saved if name.endswith("e_score_correction_bias")}
    released = dict(model.parameters())
    assert biases
    assert all(bool(released[name].isnan().all()) for name in biases)
    [bucket] = learners.open(folder=folder).buckets(1 << 40, "bfloat16")
    sent = dict(bucket.tensors())
    assert {str(sent[name].dtype) for name in biases} == {"torch.float32"}
    model.load_weights([*sent.items()])
    restored = dict(model.parameters())
    assert all(torch.equal(restored[name], saved[name]) for name in biases)
    assert not any(bool(tensor.isnan().any()) for tensor in restored.values())


def checksums(model: Model) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in model.parameters()}


def test_tensors_that_are_no_rows_of_one_weight_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", num_hidden_layers=1, vocab_size=8))
    model.config.model_type = "hrm_text"  # its folders have gate and up projection in one tensor
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    with pytest.raises(ModelError, match="not made of rows of one weight"):
        hub_tensors(model, shapes)
