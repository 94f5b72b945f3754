"""Float8 weights are read with their scales, and what cannot be read is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.core.errors import ModelError
from agentrl.models.export import export_model
from agentrl.models.hub_tensors import hub_tensors
from agentrl.models.load import load_model
from agentrl.models.weight_files import WeightFiles, float32_weights
from tests.unit.learner.learners import make_model
from tests.unit.models.float8_folders import FORMS, quantize


@pytest.mark.parametrize("form", FORMS)
def test_every_slice_of_a_float8_weight_is_that_of_the_whole(form: str, tmp_path: Path) -> None:
    expected = quantize(make_model(tmp_path, "llama"), FORMS[form])
    files = WeightFiles(tmp_path, "model.path")
    assert {spec.name: spec.shape for spec in files.specs()} == {name: t.shape for name, t in expected.items()}
    for name, weight in expected.items():
        assert torch.equal(files.read(name, ()), weight)
        for start, stop in ((0, 1), (1, 19), (15, 17), (17, len(weight)), (3, 3)):
            slices = (slice(start, stop), *[slice(5, 23)] * (weight.ndim - 1))
            assert torch.equal(files.read(name, slices), weight[slices])


@pytest.mark.parametrize("form", ["blocks", "one a weight", "rows of fbgemm"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_float8_folder_is_loaded_and_exported_as_its_weights_are(form: str, family: str, tmp_path: Path) -> None:
    expected = quantize(make_model(tmp_path / "model", family), FORMS[form])
    model = load_model(tmp_path / "model")
    assert not hasattr(model.config, "quantization_config")
    loaded = model.state_dict()
    for tensor in hub_tensors(model, {name: tuple(weight.shape) for name, weight in loaded.items()}):
        assert torch.equal(tensor.slice_weight(loaded[tensor.weight]), expected[tensor.name].float()), tensor.name
    export_model(tmp_path / "model", tmp_path / "out", "bfloat16")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == expected.keys()
    assert all(
        torch.equal(exported[name], weight) and exported[name].dtype == weight.dtype
        for name, weight in expected.items()
    )
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4'"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt'"),
        ({"bits": 8}, "quant_method=None"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
            r"'compressed-tensors' \(int4\)",
        ),
    ],
)
def test_another_quantisation_is_refused_by_name(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = json.loads((make_model(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=message):
        WeightFiles(tmp_path, "model.path")
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NAME: torch.zeros(48, 32).to(torch.float8_e4m3fn)}, "up_proj.weight is float8 and has no scale"),
        (
            {NAME: torch.zeros(48, 32).to(torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(5, 3)},
            r"the scale of .*up_proj.weight has the shape \[5, 3\], which does not fit a weight of \[48, 32\]",
        ),
        ({NAME: torch.zeros(48, 32, dtype=torch.int8)}, "up_proj.weight is int8, and the model's is a floating-point"),
        ({NAME: torch.zeros(48, 32, dtype=torch.uint16)}, "up_proj.weight is U16, a dtype that agentrl does not read"),
    ],
)
def test_weights_of_a_dtype_that_does_not_fit_are_refused_by_name(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    weights = load_file(make_model(tmp_path) / "model.safetensors") | tensors
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def read_all() -> None:
        files = WeightFiles(tmp_path, "model.path")
        for name in files.shapes():
            files.check_floats(name)
            files.read(name, ())

    with pytest.raises(ModelError, match=message):
        read_all()


def test_the_weights_of_a_smaller_model_that_are_float32_are_listed(tmp_path: Path) -> None:
    norm, bias = "model.norm.weight", "model.layers.0.mlp.gate.e_score_correction_bias"
    weights = {"model.embed_tokens.weight": torch.zeros(9, 9), norm: torch.ones(9), bias: torch.ones(4)}
    for big, expected in ((torch.bfloat16, {norm, bias}), (torch.float32, {bias})):
        saved = {name: tensor.to(big) if tensor.ndim > 1 else tensor for name, tensor in weights.items()}
        save_file(saved, tmp_path / "model.safetensors")
        assert float32_weights(WeightFiles(tmp_path, "model.path").specs()) == expected
