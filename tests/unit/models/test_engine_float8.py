"""Float8 weights as engines take them: which ones, their numbers and scales, and how engines are started for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.errors import ConfigError
from agentrl.distributed.base import TensorSpec
from agentrl.models import engine_float8
from agentrl.models.engine_float8 import (
    KEPT_KEY,
    QUANTIZATION,
    EngineFloat8,
    check_published,
    engine_overrides,
    has_float8_engines,
    read_engine_float8,
)
from agentrl.models.export import export_model
from agentrl.models.load import model_config
from tests.unit.learner.learners import make_model
from tests.unit.models.float8_folders import FORMS, quantize

LAYER = "model.layers.3."
FORM = EngineFloat8((3, 4), False, ())


def quantized(form: EngineFloat8, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    [spec, scale_spec] = form.sent_specs(TensorSpec(f"{LAYER}mlp.up_proj.weight", "bfloat16", tuple(weight.shape)))
    into, scales = torch.empty(spec.shape, dtype=torch.float8_e4m3fn), torch.empty(scale_spec.shape)
    form.quantize(weight, into, scales)
    return into, scales


@pytest.mark.parametrize("powers", [False, True])
@given(rows=st.integers(1, 11), columns=st.integers(1, 11), at_once=st.integers(1, 60), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_block_is_divided_by_its_scale_and_rounded_to_the_nearest(
    powers: bool, rows: int, columns: int, at_once: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_float8, "_CHUNK", at_once)
        random = torch.Generator().manual_seed(seed)
        weight = torch.randn(rows, columns, generator=random) * 10 ** torch.randn(rows, columns, generator=random)
        form = EngineFloat8((3, 4), powers, ())
        into, scales = quantized(form, weight)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    values = values[values.isfinite()].sort().values
    for row in range(rows):
        for column in range(columns):
            block = weight[row // 3 * 3 : row // 3 * 3 + 3, column // 4 * 4 : column // 4 * 4 + 4].double()
            scale = float(scales[row // 3, column // 4])
            exact = float(block.abs().max()) / 448
            if powers:
                assert math.frexp(scale)[0] == 0.5
                assert scale / 2 < exact <= scale or exact < 1e-4 / 448
            else:
                assert scale == pytest.approx(exact, rel=1e-6)
            wanted = float(weight[row, column]) / scale
            error = abs(float(into[row, column].double()) - wanted)
            assert error <= float((values - wanted).abs().min()) + 1e-4 * abs(wanted)


@pytest.mark.parametrize("powers", [False, True])
def test_weights_that_have_not_changed_have_the_same_float8_numbers_again(powers: bool) -> None:
    """A model published in float8 is sent to its engines as it was published, but for the rounding of scales."""
    form = EngineFloat8((16, 16), powers, ())
    into, scales = quantized(form, torch.randn(40, 50, generator=torch.Generator().manual_seed(0)))
    full = scales.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :50]
    again, scales_again = quantized(form, (into.float() * full).bfloat16())
    assert torch.equal(again.view(torch.uint8), into.view(torch.uint8))
    assert torch.allclose(scales_again, scales, rtol=0 if powers else 2**-8, atol=0)


def test_a_matrix_of_zeros_has_scales_that_are_not_zero() -> None:
    for powers in (False, True):
        into, scales = quantized(EngineFloat8((3, 4), powers, ()), torch.zeros(5, 5))
        assert bool((scales > 0).all())
        assert not into.float().any()


@pytest.mark.parametrize(
    ("name", "is_float8"),
    [
        ("self_attn.q_proj.weight", True),
        ("self_attn.kv_a_proj_with_mqa.weight", True),
        ("mlp.experts.17.down_proj.weight", True),
        ("mlp.shared_experts.gate_proj.weight", True),
        ("mlp.gate_up_proj.weight", True),
        ("self_attn.indexer.wk.weight", True),
        ("self_attn.indexer.weights_proj.weight", False),
        ("mlp.gate.weight", False),
        ("mlp.shared_expert_gate.weight", False),
        ("input_layernorm.weight", False),
        ("self_attn.q_proj.bias", False),
        ("mlp.gate.e_score_correction_bias", False),
    ],
)
def test_matrices_of_decoder_layers_are_float8(name: str, is_float8: bool) -> None:
    shape = (4,) if "norm" in name or "bias" in name else (4, 4)
    assert FORM.is_quantized(LAYER + name, shape) == is_float8
    assert not FORM.is_quantized(name, shape), "outside of a layer"
    skipping = EngineFloat8((3, 4), False, (f"{LAYER}{name.removesuffix('.weight')}", "lm_head"))
    assert not skipping.is_quantized(LAYER + name, shape), "modules_to_not_convert"
    assert FORM.is_quantized(f"{LAYER}mlp.gate_proj.weight", (4, 4))
    assert EngineFloat8((3, 4), False, ("mlp.gate",)).is_quantized(f"{LAYER}mlp.gate_proj.weight", (4, 4))


def make_folder(folder: Path, **entries: object) -> Path:
    config = json.loads((make_model(folder) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    return folder


BLOCKS = {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"}
TENSORS = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize(
    ("dtype", "entries", "overrides", "is_float8"),
    [
        ("auto", {}, None, False),
        ("bfloat16", {}, None, False),
        ("float8", {}, {"quantization_config": dict(QUANTIZATION)}, True),
        ("auto", {"quantization_config": BLOCKS}, None, True),
        ("float8", {"quantization_config": BLOCKS}, None, True),
        ("bfloat16", {"quantization_config": BLOCKS}, {"quantization_config": None}, False),
        ("bfloat16", {"quantization_config": TENSORS}, {"quantization_config": None}, False),
        ("auto", {KEPT_KEY: BLOCKS}, {"quantization_config": BLOCKS}, True),
        ("bfloat16", {KEPT_KEY: BLOCKS}, None, False),
    ],
)
def test_engines_are_started_for_what_they_are_sent(
    dtype: str, entries: Mapping[str, Any], overrides: Mapping[str, Any] | None, is_float8: bool, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, **entries)
    assert engine_overrides(dtype, folder) == overrides
    assert has_float8_engines(dtype, folder) == is_float8


def test_a_form_in_which_engines_take_no_new_weights_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", quantization_config=TENSORS)
    with pytest.raises(ConfigError, match=r"a: quantization_config has quant_method='fp8', weight_block_size=None"):
        read_engine_float8(folder)
    with pytest.raises(ConfigError, match=r"weights\.dtype=float8: .* model_type='gpt_oss'"):
        read_engine_float8(make_folder(tmp_path / "b", model_type="gpt_oss"))


def test_checkpoints_of_a_float8_model_keep_how_its_engines_are(tmp_path: Path) -> None:
    """A resumed run has the same engines; an export is a bfloat16 model."""
    folder, saved = make_model(tmp_path / "float8"), tmp_path / "saved"
    quantize(folder, FORMS["powers of two"])
    model_config(folder).save_pretrained(saved)
    assert read_engine_float8(saved) == read_engine_float8(folder) == EngineFloat8((16, 16), True, ())
    (saved / "model.safetensors").write_bytes((make_model(tmp_path / "plain") / "model.safetensors").read_bytes())
    export_model(saved, tmp_path / "out", "bfloat16")
    assert not has_float8_engines("auto", tmp_path / "out")
    assert has_float8_engines("auto", saved)


def test_a_weight_that_is_float8_on_one_side_only_is_named() -> None:
    names = [f"{LAYER}self_attn.{name}.weight" for name in ("q_proj", "k_norm")]
    specs = [TensorSpec(name, "bfloat16", (4, 4)) for name in names]
    check_published(FORM, specs, names[:1], "here")
    with pytest.raises(
        ConfigError, match=r"^here: .*q_proj\.weight is bfloat16 in the folder, and would be sent .* float8"
    ):
        check_published(FORM, specs, [], "here")
    with pytest.raises(ConfigError, match=r"^here: .*k_norm\.weight is float8 in the folder, and would be .* bfloat16"):
        check_published(FORM, specs, names, "here")
