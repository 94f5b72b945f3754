"""Families of models: which folders are whose, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.families.registry import FAMILIES, read_family
from tests.unit.learner.megatron.models import model_config


def test_models_of_other_families_are_refused_with_a_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ModelError, match=r"model\.path=.*model_type='gpt2', only deepseek_v3, glm4, .*qwen3_moe, qwen3_vl; set learner"
    ):
        read_family(tmp_path, "model.path")


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "qwen3_next", "qwen3_5_moe"])
def test_families_that_the_layers_lack_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    reason = "keys that an indexer selects" if "d" in name[0] or "dsa" in name else "linear attention"
    with pytest.raises(ModelError, match=rf"model_type='{name}', as its layers .*{reason}.*learner\.backend=fsdp"):
        read_family(tmp_path, "model.path")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path=.*config\.json is no configuration of a model"):
        read_family(tmp_path, "model.path")


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    fields = model_config("moonlight").to_dict() | {"model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    family, hf = read_family(tmp_path, "model.path")
    assert (family.hf_type, hf.kv_lora_rank) == ("deepseek_v3", 16)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=true"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias=false"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, "topk_group=2"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
    ],
)
def test_what_megatron_models_lack_is_refused(name: str, changed: dict[str, object], message: str) -> None:
    family, hf = FAMILIES[name], model_config(name, **changed)
    with pytest.raises(ModelError, match=message):
        family.options(hf)
