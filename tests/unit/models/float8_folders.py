"""Folders of tiny models whose matrices are float8 with scales, in every form that publishers use."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file


class Float8(NamedTuple):
    """A form of float8 weights."""

    quantization: Mapping[str, Any]
    """``quantization_config``; empty: none."""
    ending: str
    """Of the name of a scale."""
    block: tuple[int, int] | None
    """Rows and columns with one scale; None: the whole weight, -1: all."""
    dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype = torch.float32
    flat: bool = False
    """Whether scales of rows have one dimension, and that of a weight none."""


_FLOAT8_GROUP = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}
FORMS = {
    "blocks": Float8({"quant_method": "fp8", "weight_block_size": [16, 16]}, "_scale_inv", (16, 16)),
    "blocks that do not divide": Float8({"quant_method": "fp8", "weight_block_size": [20, 24]}, "_scale_inv", (20, 24)),
    "blocks without a configuration": Float8({}, "_scale_inv", (16, 8)),
    "powers of two": Float8(
        {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
        "_scale_inv",
        (16, 16),
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "one a weight": Float8({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", (-1, -1), flat=True),
    "one a weight, inverse": Float8({"quant_method": "fp8"}, "_scale_inv", (-1, -1)),
    "e5m2": Float8({"quant_method": "fp8"}, "_scale", (-1, -1), dtype=torch.float8_e5m2),
    "rows of fbgemm": Float8({"quant_method": "fbgemm_fp8"}, "_scale", (1, -1)),
    "rows in one dimension": Float8({"quant_method": "fbgemm_fp8"}, "_scale", (1, -1), flat=True),
    "compressed-tensors": Float8({"quant_method": "compressed-tensors", **_FLOAT8_GROUP}, "_scale", (1, -1)),
}


def quantize(folder: Path, form: Float8) -> dict[str, torch.Tensor]:
    """Replace the matrices of decoder layers in a folder by float8 ones, others by bfloat16; vectors stay float32.

    Returns:
        all weights as they are to be read.
    """
    weights = load_file(folder / "model.safetensors")
    expected, saved = {}, {}
    for name, weight in weights.items():
        if weight.ndim != 2 or ".layers." not in name or "router" in name or ".gate." in name:
            expected[name] = saved[name] = weight.bfloat16() if weight.ndim > 1 else weight
            continue
        rows, columns = (
            size if block == -1 else block for size, block in zip(weight.shape, form.block or (), strict=True)
        )
        counts = [math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns)]
        scale = torch.empty(counts).uniform_(0.002, 0.02, generator=torch.Generator().manual_seed(len(saved)))
        scale = scale.to(form.scale_dtype)
        full = scale.float().repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
        full = full[:, : weight.shape[1]]
        saved[name] = (weight / full).clamp(-448.0, 448.0).to(form.dtype)  # torch 2.11 makes larger ones nan
        expected[name] = (saved[name].float() * full).bfloat16()
        saved[name + form.ending] = (
            (scale.squeeze(-1) if min(counts) < max(counts) else scale.reshape(())) if form.flat else scale
        )
        saved[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    config = json.loads((folder / "config.json").read_text())
    if form.quantization:
        config["quantization_config"] = dict(form.quantization)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return expected
