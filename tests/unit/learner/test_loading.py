"""Loading shard by shard: each rank's weights, folders of every kind, and the memory that it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ModelError
from agentrl.learner.attention import IMPLEMENTATION
from agentrl.learner.fsdp import loading
from agentrl.learner.fsdp.loading import _pack_rows, load_critic, load_policy
from agentrl.learner.fsdp.model import PackedModel, PolicyModel, ValueModel
from agentrl.learner.fsdp.sharding import RankMesh, shard
from agentrl.learner.fsdp.weights import allocate, fill, local, model_hub_tensors, named_tensors
from agentrl.models.load import empty_model, load_model, load_value_model, value_head_names
from agentrl.models.weight_files import WeightFiles
from tests.unit.learner.learners import SIZES, make_model
from tests.unit.models.float8_folders import FORMS, quantize

CPU = torch.device("cpu")
TOKENS_T = torch.arange(2, 32)


@contextmanager
def ranks(rank: int, world: int) -> Iterator[None]:
    """Be one rank of a process group in which nothing is sent.

    torch caches meshes by their shape: in this process every number of ranks is used with one ``rank`` only.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(folder: Path, world: int, values: bool = False) -> PackedModel:
    """A rank's model, without the probes, for which weights would have to be gathered."""
    model = (ValueModel if values else PolicyModel)(empty_model(folder, IMPLEMENTATION, values=values), 1024)
    return fill_shards(model, folder, world)


def fill_shards(model: PackedModel, folder: Path, world: int) -> PackedModel:
    shard(model, RankMesh(init_device_mesh("cpu", (world,)), None), LearnerConfig(precision="float32"))
    allocate(model, CPU)
    files = WeightFiles(folder, "model.path")
    fill(model.hf, folder, files, values=isinstance(model, ValueModel), key="model.path")
    return model


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are made, and the largest; not those of files, which are mapped into memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.largest = 0
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = storage  # its address is not used again
                    size = 0 if func is torch.ops.aten.set_.source_Storage else storage.nbytes()
                    self.bytes += size
                    self.largest = max(self.largest, size)
        return found


@pytest.mark.parametrize(("family", "world"), [("qwen3", 2), ("qwen2", 3), ("llama", 7)])
@pytest.mark.parametrize("values", [False, True])
def test_a_rank_has_its_part_of_each_weight(tmp_path, family, world, values):
    folder = make_model(tmp_path / family, family)
    full_weights = named_tensors((load_value_model if values else load_model)(folder))
    with ranks(world - 1, world):
        weights = named_tensors(sharded(folder, world, values).hf)
    assert weights.keys() == full_weights.keys()
    for name, tensor in weights.items():
        parts = full_weights[name].chunk(world)
        assert torch.equal(local(tensor), parts[world - 1] if world == len(parts) else full_weights[name][:0]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rank_has_its_part_of_each_float8_weight(tmp_path, family, form):
    whole = quantize(make_model(tmp_path, family), FORMS[form])
    with ranks(2, 3):
        hf = sharded(tmp_path, 3).hf
    shards = named_tensors(hf)
    expected = {name: torch.empty(tensor.shape) for name, tensor in shards.items()}
    for tensor in model_hub_tensors(hf):
        tensor.slice_weight(expected[tensor.weight]).copy_(whole[tensor.name])
    for name, tensor in shards.items():
        assert torch.equal(local(tensor), (*expected[name].chunk(3), *[expected[name][:0]] * 2)[2]), name


def test_a_policy_of_float8_weights_is_that_of_its_weights(tmp_path):
    """A checkpoint's configuration has no quantisation."""
    weights = quantize(make_model(tmp_path / "float8", "llama"), FORMS["blocks"])
    make_model(tmp_path / "plain", "llama")
    save_file(weights, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    config = LearnerConfig(precision="float32")
    policy, plain = (load_policy(tmp_path / name, config, CPU, None) for name in ("float8", "plain"))
    assert all(torch.equal(t, dict(plain.named_parameters())[name]) for name, t in policy.named_parameters())
    policy.hf.config.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


def test_integers_are_no_weights_of_a_policy(tmp_path):
    weights = load_file(make_model(tmp_path, "llama") / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(48, 32, dtype=torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight is int8, and the model's is a floating-point number"):
        load_policy(tmp_path, LearnerConfig(precision="float32"), CPU, None)


def test_a_rank_never_holds_more_than_its_shards(tmp_path):
    folder = make_model(tmp_path / "m", "llama", num_hidden_layers=8, hidden_size=64)
    weights = load_file(folder / "model.safetensors").values()
    size, largest = sum(tensor.nbytes for tensor in weights), max(tensor.nbytes for tensor in weights)
    with Allocations() as skeleton:
        model = PolicyModel(empty_model(folder, IMPLEMENTATION), 1024)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert skeleton.largest <= largest
    with ranks(7, 8), Allocations() as made:
        fill_shards(model, folder, 8)
    stored_weights = sum(local(tensor).nbytes for tensor in named_tensors(model.hf).values())
    assert size / 8 <= stored_weights < size / 7
    assert made.bytes < size / 6
    assert made.largest <= largest / 8


def test_tied_weights_share_memory_and_buffers_are_the_models_own(tmp_path):
    folder = make_model(tmp_path / "m", "qwen3")
    policy, plain = load_policy(folder, LearnerConfig(precision="float32"), CPU, None), load_model(folder)
    assert policy.hf.lm_head.weight is policy.hf.model.embed_tokens.weight
    expected = dict(plain.named_buffers())
    assert {name: tensor.tolist() for name, tensor in policy.hf.named_buffers()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    assert not any(parameter.is_meta for parameter in policy.parameters())


def test_tied_weights_that_differ_in_the_files_are_untied(tmp_path, caplog):
    folder = make_model(tmp_path / "m", "qwen3")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        policy = load_policy(folder, LearnerConfig(precision="float32"), CPU, None)
    assert "untied" in caplog.text
    assert torch.equal(policy.hf.lm_head.weight, weights["lm_head.weight"])
    assert torch.equal(policy.hf.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


def test_several_files_and_bfloat16_become_float32_masters(tmp_path):
    model = load_model(make_model(tmp_path / "m", "llama"), "bfloat16")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    weights = named_tensors(load_policy(tmp_path / "many", LearnerConfig(precision="float32"), CPU, None).hf)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in named_tensors(model).items())


MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "head_dim": 8,
}  # fmt: skip


def test_experts_that_transformers_fuses_are_read_by_each_rank(tmp_path, caplog):
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SIZES | MOE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    with caplog.at_level(logging.WARNING):
        policy = load_policy(tmp_path / "moe", LearnerConfig(precision="float32"), CPU, None)
    assert not caplog.text
    assert not policy.separates_rows
    actual, expected = named_tensors(policy.hf), named_tensors(load_model(tmp_path / "moe"))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    with ranks(1, 2):
        parts = named_tensors(sharded(tmp_path / "moe", 2).hf)
    assert all(torch.equal(local(tensor), expected[name].chunk(2)[1]) for name, tensor in parts.items())


def test_a_folder_of_bin_files_is_loaded_with_transformers(tmp_path):
    folder = make_model(tmp_path / "m", "llama")
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    actual_weights = named_tensors(load_policy(folder, LearnerConfig(precision="float32"), CPU, None).hf)
    assert all(torch.equal(actual_weights[name], tensor) for name, tensor in weights.items())


def test_a_critic_has_a_head_of_zeros_unless_the_folder_has_one(tmp_path):
    folder = make_model(tmp_path / "m", "qwen3")
    critic = load_critic(folder, LearnerConfig(precision="float32"), CPU, None)
    assert not any(parameter.any() for parameter in critic.head.parameters())
    saved = load_value_model(folder)
    torch.nn.init.ones_(saved.score.weight)
    saved.save_pretrained(tmp_path / "critic")
    assert bool(
        (load_critic(tmp_path / "critic", LearnerConfig(precision="float32"), CPU, None).head.weight == 1).all()
    )
    assert value_head_names(critic.hf) == {"score.weight", "score.bias"}


def test_a_folder_that_lacks_weights_is_refused(tmp_path):
    folder = make_model(tmp_path / "m", "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"algo\.reference=.*1 weights are missing, such as 'model\.norm\.weight'"):
        load_policy(folder, LearnerConfig(precision="float32"), CPU, None, "algo.reference")
    (folder / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match=r"model\.path=.*cannot be read"):
        load_policy(folder, LearnerConfig(precision="float32"), CPU, None)


def make_other(folder: Path, kind: str, **options: object) -> Path:
    """Save a random model of another family."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **(SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2} | options))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["mistral", "mixtral", "gemma3_text", "qwen2", "qwen2_moe", "phimoe"])
def test_sliding_windows_are_those_of_the_architecture(kind: str, tmp_path: Path) -> None:
    """The probe's rows reach beyond the window, whatever its size."""
    options = {"sliding_window": 100, "use_sliding_window": True, "max_window_layers": 0, "head_dim": 16}
    policy = load_policy(make_other(tmp_path, kind, **options), LearnerConfig(precision="float32"), CPU, None)
    assert policy.hf.config.sliding_window == 100


def test_a_window_that_the_learner_ignores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3.5-MoE's attention takes its window from a mask."""
    make_other(tmp_path, "phimoe", sliding_window=100, router_jitter_noise=0.3, input_jitter_noise=0.3)
    policy = load_policy(tmp_path, LearnerConfig(precision="float32"), CPU, None)
    assert policy.hf.training
    first, second = (policy(batch, scored, 1.0)[0] for batch, scored in [(_pack_rows(TOKENS_T), np.arange(1, 30))] * 2)
    assert torch.equal(first, second), "routers draw nothing at random"
    monkeypatch.setattr(loading, "_name_windows", lambda hf: None)
    with pytest.raises(ModelError, match="other log-probabilities than each row alone with its own attention"):
        load_policy(tmp_path, LearnerConfig(precision="float32"), CPU, None)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("llama4_text", "AttributeError: '(Moe)?CausalLM"),
        ("helium", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_an_architecture_with_other_modules_is_refused_by_its_folder(kind: str, error: str, tmp_path: Path) -> None:
    make_other(tmp_path, kind, head_dim=16)
    with pytest.raises(
        ModelError, match=rf"^model\.path={tmp_path}: the fsdp learner cannot compute .*ForCausalLM: {error}"
    ):
        load_policy(tmp_path, LearnerConfig(precision="float32"), CPU, None)
