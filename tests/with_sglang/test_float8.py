"""What agentrl sends to float8 engines is bit for bit what SGLang's own code loads from a float8 folder.

SGLang's model classes and loaders run on a CPU, which has none of its float8 kernels: parameters are compared, not outputs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typing_extensions import override

from agentrl.distributed.flat_bucket import serialize_tensors
from agentrl.distributed.sglang_loader import FOLDER
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import encode_changes
from agentrl.inference.launch.cpu_sglang import environment
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.models.engine_float8 import DTYPE, QUANTIZATION, EngineFloat8, engine_overrides, read_engine_float8
from agentrl.models.weight_files import float32_weights
from tests.unit.learner.megatron.models import MODELS, SIZES

pytestmark = pytest.mark.sglang

SCRIPT = Path(__file__).with_name("load_float8.py")
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
POWERS = {**QUANTIZATION, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]}
CASES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "qwen3": {"head_dim": 128, **ROPE},
    "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 128, "mlp_only_layers": []},
    "glm4": {"head_dim": 128},
    "glm4_moe": {"head_dim": 128, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        "moe_intermediate_size": 128, "q_lora_rank": 160, "kv_lora_rank": 192, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
}  # fmt: skip
"""Sizes of which each part of a joined weight is whole blocks of 128."""


class Float8Tensors(NamedTensors):
    """Weights by name that engines have in a form of float8."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], form: EngineFloat8) -> None:
        super().__init__(tensors)
        self._form = form
        self.float32_weights = float32_weights([*self.specs()])

    @property
    @override
    def float8(self) -> EngineFloat8:
        return self._form


def quantize(weight: torch.Tensor, *, powers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix block by block."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales, quantized = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            at = slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128)
            block = weight[at].float()
            scale = block.abs().max() / 448
            scale = 2 ** torch.ceil(torch.log2(scale)) if powers else scale
            scales[row, column] = scale
            quantized[at] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantized, scales


def write_float8(
    plain: Path, folder: Path, weights: Mapping[str, torch.Tensor], quantization: Mapping[str, object]
) -> None:
    """Write the float8 folder of a model whose bfloat16 folder is ``plain``."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(quantization)}))
    saved, skipped = {}, "model.layers.1.mlp." if quantization is POWERS else "-"
    for name, weight in weights.items():
        if weight.ndim < 2 or ".layers." not in name or ".gate." in name or name.startswith(skipped):
            saved[name] = weight
        else:
            saved[name], saved[f"{name}_scale_inv"] = quantize(weight, powers=quantization is POWERS)
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})


def write_case(folder: Path, family: str) -> None:
    """Write what ``load_float8.py`` reads."""
    plain = folder / "plain"
    sizes = {**SIZES, **MODELS[family], "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **sizes | CASES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
    quantization = POWERS if family == "qwen3" else QUANTIZATION
    weights = load_file(plain / "model.safetensors")
    write_float8(plain, folder / "disk", weights, quantization)
    form = read_engine_float8(folder / "disk")
    assert form == EngineFloat8.parse(quantization, "")
    overrides = engine_overrides("float8", plain) if quantization is QUANTIZATION else {"quantization_config": POWERS}
    (folder / "overrides.json").write_text(json.dumps(overrides))
    changing = dict(weights)
    learner = WeightExporter(Float8Tensors(changing, form))
    for size in (1, 1 << 30):
        lines = [serialize_tensors(bucket.tensors()) for bucket in learner.buckets(size, DTYPE)]
        (folder / f"{size}.buckets").write_text("\n".join(lines))
    lines = []
    for base, version in ((None, "a"), ("a", "b")):
        if base is not None:
            changing |= {
                name: weight * (1 + 0.01 * torch.rand_like(weight))
                for name, weight in weights.items()
                if "layers.1" in name
            }
        for number, bucket in enumerate(learner.buckets(1 << 16, DTYPE)):
            changes = bucket.changes(base, version)
            lines.append(encode_changes(changes, base=base, held=version, number=number, last=bucket.last).first)
    (folder / "changes").write_text("\n".join(lines))
    write_float8(plain, folder / "changed", changing, quantization)


@pytest.fixture(scope="module")
def loaded(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder, and what SGLang has loaded of each family."""
    folder = tmp_path_factory.mktemp("float8")
    for family in CASES:
        (folder / family).mkdir()
        write_case(folder / family, family)
    torch.save(torch.randn(300, 200).bfloat16(), folder / "matrix.pt")
    variables = environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    path = os.pathsep.join([variables["PYTHONPATH"].split(os.pathsep)[0], str(FOLDER)])
    command = [sglang_python, SCRIPT, *(folder / family for family in CASES)]
    run = subprocess.run(command, env=os.environ | variables | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    yield folder, json.loads((folder / "results.json").read_text())
    shutil.rmtree(folder)


@pytest.mark.parametrize("family", CASES)
def test_engines_have_what_they_would_load_from_disk(family: str, loaded: tuple[Path, dict[str, Any]]) -> None:
    results = loaded[1][family]
    assert results["float8"] >= 6
    assert results["1"] == [], "buckets of single weights"
    assert results[str(1 << 30)] == [], "one bucket"
    assert results["changes"] == [], "what has changed only"
    first, second = results["bytes"][: len(results["bytes"]) // 2], results["bytes"][len(results["bytes"]) // 2 :]
    assert sum(second) < 0.8 * sum(first)


def test_powers_of_two_are_those_of_sglang(loaded: tuple[Path, dict[str, Any]]) -> None:
    matrix = torch.load(loaded[0] / "matrix.pt")
    expected, expected_scales = torch.load(loaded[0] / "powers.pt")
    actual, scales = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.empty(expected_scales.shape)
    EngineFloat8.parse(POWERS, "").quantize(matrix, actual, scales)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
