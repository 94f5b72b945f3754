"""Every family on one rank: logits of packed rows against transformers, and weights that come back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from agentrl.core.errors import ConfigError, ModelError
from agentrl.learner.megatron.cpu import computing_on
from agentrl.learner.megatron.families.registry import FAMILIES, read_family
from agentrl.learner.megatron.layout import Layout
from agentrl.learner.megatron.model import build_model, packed_tokens
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights, load_weights
from agentrl.models.load import load_model
from tests.unit.learner.megatron.models import MODELS, make_model, model_config

CPU, LENGTHS = torch.device("cpu"), (23, 9, 14)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from megatron.core import parallel_state

    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with computing_on(CPU):
        Layout().start(0)
        yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.usefixtures("rank")
def test_logits_are_those_of_transformers_and_weights_come_back(folder: Path) -> None:
    built = build_model(folder, {}, device=CPU, dtype=torch.float32)
    weights = ModelWeights(built)
    load_weights(weights, folder)
    files = load_file(folder / "model.safetensors")
    into = [(spec.name, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))) for spec in weights.specs()]
    weights.gather(into, GatherGroups.of_megatron())
    assert {name for name, _ in into} == files.keys()
    assert all(torch.equal(out, files[name]) for name, out in into)

    token_ids_L = torch.randint(96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions_L = torch.cat([torch.arange(length) for length in LENGTHS])
    row_L = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    packed = packed_tokens(positions_L, row_L, CPU, torch.float32)
    [chunk] = built.chunks
    with torch.no_grad():
        found = chunk(token_ids_L[None], positions_L[None], None, packed_seq_params=packed)[0]
        hf = load_model(folder)
        expected = torch.cat([hf(ids[None]).logits[0] for ids in token_ids_L.split(LENGTHS)])
    assert torch.allclose(found, expected, atol=1e-5, rtol=0), (found - expected).abs().max()


@pytest.mark.usefixtures("rank")
def test_options_pass_through_and_unknown_ones_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "qwen3")
    config = build_model(
        folder,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 2,
            "overlap_grad_reduce": True,
        },
        device=CPU,
        dtype=torch.float32,
    ).config
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 2)
    for option, message in {
        "recompute_granularty": r"learner\.megatron\.recompute_granularty: .*did you mean .*recompute_granularity\?",
        "num_layers": r"learner\.megatron\.num_layers: the model's config\.json sets it to 4",
        "recompute_granularity": r"learner\.megatron: Megatron-Core refuses these options: .*recompute",
    }.items():
        with pytest.raises(ConfigError, match=message):
            build_model(folder, {option: "some"}, device=CPU, dtype=torch.float32)


def test_models_of_other_families_are_refused_with_a_list(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ModelError, match=r"model\.path=.*model_type='gpt2', only deepseek_v3, glm4, .*qwen3_moe; set learner"
    ):
        read_family(tmp_path, "model.path")


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    fields = json.loads((make_model(tmp_path, "moonlight") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "kimi_k2"}))
    family, hf = read_family(tmp_path, "model.path")
    assert (family.hf_type, hf.kv_lora_rank) == ("deepseek_v3", 16)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias=true"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("deepseek_v3", {"num_experts_per_tok": 6}, "topk_group=2"),
    ],
)
def test_what_megatron_models_lack_is_refused(name: str, changed: dict[str, object], message: str) -> None:
    family, hf = FAMILIES[name], model_config(name, **changed)
    with pytest.raises(ModelError, match=message):
        family.options(hf)
