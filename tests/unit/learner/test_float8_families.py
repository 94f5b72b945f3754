"""Policies of float8 folders of published families have the log-probabilities of their dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.models.engine_float8 import EngineFloat8
from tests.unit.learner.learners import Learners, make_batch
from tests.unit.learner.megatron.models import make_model
from tests.unit.models.float8_folders import FORMS, quantize

CASES = {
    "deepseek_v3": "blocks",
    "moonlight": "powers of two",  # without query compression
    "glm4_moe": "one a weight",
    "qwen3_moe": "rows of fbgemm",
    "gpt_oss": "compressed-tensors",
}


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[Learners]:
    learners = Learners(tmp_path / "float8")
    yield learners
    learners.close()


@pytest.mark.parametrize("family", CASES)
def test_a_float8_policy_is_that_of_its_dequantised_weights(family: str, tmp_path: Path, learners: Learners) -> None:
    folder = make_model(tmp_path / "float8", family, num_hidden_layers=2)
    weights = quantize(folder, FORMS[CASES[family]])
    float8 = {name for name, t in load_file(folder / "model.safetensors").items() if t.dtype == torch.float8_e4m3fn}
    assert len(float8) > 8
    plain = make_model(tmp_path / "plain", family, num_hidden_layers=2)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    batch = make_batch((14, 9))
    scores = [learners.open(folder=model).logprobs(batch) for model in (folder, plain)]
    assert scores[0].keys() == scores[1].keys()
    assert all(float(abs(row).max()) > 1 for row in scores[0].values())
    assert all((scores[0][key] == row).all() for key, row in scores[1].items())


def test_engines_get_the_float8_numbers_of_the_folder(tmp_path: Path, learners: Learners) -> None:
    """Until the weights change. The rank reads from the folder which ones are float8."""
    folder = make_model(tmp_path / "float8", "deepseek_v3")
    quantize(folder, FORMS["powers of two"])
    saved = load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    sent = {
        name: tensor.clone()
        for bucket in learners.open().buckets(20_000, "float8_e4m3fn")
        for name, tensor in bucket.tensors()
    }
    assert sent.keys() == {name for name in saved if not name.endswith("input_scale")}
    biases = [name for name in sent if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(torch.equal(sent[name], saved[name]) for name in biases)
    assert all(sent[name].dtype == torch.float32 for name in biases)
    form = EngineFloat8((16, 16), True, ())
    for name, tensor in sent.items():
        if name.endswith("_scale_inv"):
            continue
        assert (tensor.dtype == torch.float8_e4m3fn) == form.is_quantized(name, tensor.shape), name
        if tensor.dtype == torch.float8_e4m3fn:
            scales = sent[f"{name}_scale_inv"].repeat_interleave(16, 0)[: len(tensor)].repeat_interleave(16, 1)
            actual = tensor.float() * scales[:, : tensor.shape[1]]
            original = (
                saved[f"{name}_scale_inv"].float().repeat_interleave(16, 0)[: len(tensor)].repeat_interleave(16, 1)
            )
            expected = saved[name].float() * original[:, : tensor.shape[1]]
            assert float((actual - expected).abs().max()) <= float(expected.abs().max()) / 16
