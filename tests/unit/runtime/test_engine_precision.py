"""Which precisions of engines a run accepts, and how their gap to the learner is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.models.weight_files import WeightFiles
from agentrl.runtime.engine_precision import check_precision, read_precision
from tests.unit.learner.learners import make_model
from tests.unit.learner.megatron.models import make_model as make_tiny
from tests.unit.models.float8_folders import FORMS, quantize

SIZES = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1}
FLOAT8 = "weights.dtype=float8"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that 2 ranks can divide into blocks: two key heads of 128."""
    return make_model(tmp_path_factory.mktemp("plain"), "qwen2", **SIZES)


def check(folder: Path, *keys: str) -> None:
    config = load_config(None, ["sampler.backend=sglang", f"model.path={folder}", *keys])
    check_precision(config, folder, WeightFiles(folder, "model.path"))


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [FLOAT8],
        [FLOAT8, "sampler.sglang.tp_size=2"],
        [FLOAT8, "sampler.sglang.quantization=fp8"],
        [FLOAT8, "sampler.sglang.speculative_algorithm=NGRAM"],
        [FLOAT8, "learner.lora={rank: 4}"],
        ["sampler.sglang.kv_cache_dtype=fp8_e4m3"],
        ["sampler.url=http://a:1", "sampler.sglang.quantization=awq"],
    ],
)
def test_engines_that_take_new_weights_are_accepted(keys: list[str], plain: Path) -> None:
    check(plain, *keys)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_routers_with_biases_may_start_with_random_weights(backend: str, tmp_path: Path) -> None:
    """Both learners send them."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 64}
    folder = make_tiny(tmp_path, "glm4_moe", **sizes, num_hidden_layers=2)
    check(folder, FLOAT8, f"learner.backend={backend}")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["sampler.sglang.quantization=fp8"], r"^sampler\.sglang\.quantization=fp8: SGLang takes no new weights"),
        (["sampler.sglang.quantization=w8a8_int8", FLOAT8], r"quantization=w8a8_int8: SGLang takes no new weights"),
        (["sampler.sglang.torchao_config=int8wo"], r"^sampler\.sglang\.torchao_config=int8wo"),
        (
            [FLOAT8, "learner.lora={rank: 4}", "weights.adapters=only"],
            r"^weights\.adapters=only with weights\.dtype=float8",
        ),
        (
            [FLOAT8, "sampler.sglang.speculative_algorithm=EAGLE"],
            r"speculative_algorithm=EAGLE with weights\.dtype=float8",
        ),
        ([FLOAT8, "sampler.sglang.tp_size=4"], r"tp_size=4: \S+ has 256 (rows|columns), which 4 ranks cannot divide"),
        ([FLOAT8, "sampler.backend=embedded"], r"sampler\.backend=embedded: it has no float8"),
    ],
)
def test_engines_that_take_no_new_weights_are_refused(keys: list[str], message: str, plain: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check(plain, *keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["sampler.sglang.quantization=fp8", "sampler.sglang.load_format=flash_rl"],
            "flash_rl with model_type='llama'",
        ),
        (
            [FLOAT8],
            r"^weights\.dtype=float8: .* model_type='llama', and that SGLang loads new float8 weights was tested of",
        ),
    ],
)
def test_families_whose_scales_sglang_drops_are_refused(keys: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check(make_model(tmp_path, "llama"), *keys)


def test_sizes_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tp_size=1: \S+ has \d+ rows, which 1 ranks cannot divide into blocks of 128"
    ):
        check(make_model(tmp_path, "qwen2"), FLOAT8)


def test_a_published_float8_model_is_compared_with_what_is_sent(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a", "qwen2")
    weights = quantize(folder, FORMS["blocks"])
    check(folder)
    check(folder, "weights.dtype=bfloat16")
    name = "model.layers.0.self_attn.q_proj.weight"
    saved = load_file(folder / "model.safetensors") | {name: weights[name]}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.path=.*q_proj.weight is bfloat16 in the folder, and would be sent"):
        check(folder)
    check(folder, "weights.dtype=bfloat16")
    quantize(make_model(tmp_path / "b", "qwen2"), FORMS["one a weight"])
    with pytest.raises(ConfigError, match=r"weight_block_size=None, .* SGLang takes new float8 weights only with"):
        check(tmp_path / "b")
    check(tmp_path / "b", "weights.dtype=bfloat16")


@pytest.mark.parametrize(
    ("family", "keys", "band"),
    [
        ("llama", [], "dense"),
        ("qwen3_moe", [], "experts"),
        ("qwen3_moe", [FLOAT8], "float8_weights"),
        ("qwen2", ["sampler.sglang.quantization=fp8", "sampler.sglang.load_format=flash_rl"], "float8_weights"),
        ("qwen2", [FLOAT8, "sampler.sglang.kv-cache-dtype=fp8_e5m2"], "float8_cache"),
        ("llama", ["sampler.backend=embedded"], "dense"),
    ],
)
def test_the_gap_is_judged_by_precision(family: str, keys: list[str], band: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, family)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    assert read_precision(load_config(None, ["sampler.backend=sglang", *keys]), folder).band == band
