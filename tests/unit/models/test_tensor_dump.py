"""Outputs of modules that SGLang writes into files, as it names and saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.models.tensor_dump import read_dump

ROW = [5, 6, 7]


def write_pass(folder: Path, number: int, ids: list[int], scale: float, rank: str = "TP0_PP0_Rank0_pid7") -> None:
    """Write a forward pass as SGLang 0.5.23 does: the last token of each output is ``scale`` times what is tested."""
    hidden = torch.arange(len(ids) * 4, dtype=torch.bfloat16).view(len(ids), 4) * scale
    tensors: dict[str, Any] = {
        "model.embed_tokens": hidden,
        "model.layers.0.input_layernorm": hidden + 1,
        "model.layers.0.self_attn.qkv_proj": hidden + 2,
        "model.layers.0.self_attn.o_proj": hidden + 3,
        "model.layers.0.post_attention_layernorm": [hidden + 4, hidden],
        "model.layers.0.mlp.down_proj": hidden + 5,
        "model.forward_batch_info.input_ids": torch.tensor(ids),
        "model.forward_batch_info.seq_lens": torch.tensor([len(ids)]),
    }
    (folder / rank).mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / rank / f"Pass{number:05d}.pt")


def test_the_newest_pass_of_the_row_has_the_names_of_transformers(tmp_path: Path) -> None:
    write_pass(tmp_path, 0, ROW, 9.0)
    write_pass(tmp_path, 1, ROW, 1.0)
    write_pass(tmp_path, 2, [8], 7.0)
    write_pass(tmp_path, 3, ROW, 5.0, "TP1_PP0_Rank1_pid8")
    outputs = read_dump(tmp_path, ROW)
    last = np.arange(8, 12, dtype=np.float32)
    names = {"input_layernorm": 1, "self_attn": 3, "post_attention_layernorm": 4, "mlp": 5}
    expected = {"model.embed_tokens": last} | {f"model.layers.0.{name}": last + more for name, more in names.items()}
    assert expected.keys() <= outputs.keys()
    assert all(np.array_equal(outputs[name], values) for name, values in expected.items())


def test_of_several_ranks_there_is_what_no_rank_has_a_part_of(tmp_path: Path) -> None:
    write_pass(tmp_path, 0, ROW, 1.0)
    assert set(read_dump(tmp_path, ROW, tensor_ranks=2)) == {
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    }


def test_another_row_has_no_outputs(tmp_path: Path) -> None:
    write_pass(tmp_path, 0, [5, 6], 1.0)
    assert read_dump(tmp_path, ROW) == {}
    assert read_dump(tmp_path / "missing", ROW) == {}
