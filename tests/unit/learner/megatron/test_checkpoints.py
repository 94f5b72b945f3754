"""Checkpoints of two ranks, loaded by one and written again, loaded by two in another layout and written again: every number is
the same, with Hugging Face folders and without; and exports of them in one process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from agentrl.cli.main import main
from agentrl.core.checksums import check_checksums
from agentrl.learner.checkpoints import complete_checkpoints
from tests.unit.learner.megatron.forked import run_ranks
from tests.unit.learner.megatron.models import add_draft_layer, make_model
from tests.unit.learner.megatron.rank_work import KILLS, STATES

pytestmark = pytest.mark.slow

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, preloaded_children: str) -> Path:
    """The checkpoints, as ``FIRST of MODEL``."""
    parent = tmp_path_factory.mktemp("checkpoints")
    for name in STATES:
        make_model(parent / name.removeprefix("fsdp "), name.removeprefix("fsdp "))
    add_draft_layer(parent / "deepseek_v3")
    (parent / "ends").mkdir()
    found = run_ranks(parent, preloaded_children, "rank_cases", saved=2, saved_by_one=1, saved_by_two=2, killed=0)
    assert found["killed"] is None
    return parent


def read(folder: Path) -> Tensors:
    """Read all tensors of a folder in the format of torch.distributed.checkpoint."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(value.size, dtype=value.properties.dtype)
        for name, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def assert_equal(tensors: Tensors, expected: Tensors) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype is expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("name", STATES)
def test_every_number_comes_back_whatever_ranks_write_and_read_it(folder: Path, name: str) -> None:
    first, second, third = (folder / f"{number} of {name}" for number in ("first", "second", "third"))
    hf = load_file(second / "model" / "model.safetensors")
    drafts = {key: hf.pop(key) for key in [*hf] if key.startswith("model.layers.4.")}
    weights = read(first / "weights")
    assert_equal(read(third / "weights"), weights)
    if name.startswith("fsdp "):
        assert_equal(hf, weights)
    else:
        assert_equal(read(second / "weights"), weights)
        assert_equal(hf, {key: weight.to(hf[key].dtype) for key, weight in weights.items()})
        trained = {key for key in weights if not key.endswith("e_score_correction_bias")}
        assert read(first / "optimizer").keys() == {f"{moment}.{key}" for moment in MOMENTS for key in trained}
    assert hf.keys() == load_file(folder / name.removeprefix("fsdp ") / "model.safetensors").keys() - drafts.keys()
    moments = read(first / "optimizer")
    for checkpoint in (second, third):
        assert_equal(read(checkpoint / "optimizer"), moments)
    assert not [*first.glob("model/*.safetensors"), *third.glob("model/*.safetensors")]
    assert drafts.keys() == (load_file(first / "draft_layers" / "model.safetensors").keys() if drafts else set())


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "fsdp qwen3_moe"])
def test_the_hugging_face_folder_is_exported_from_what_the_ranks_wrote(folder: Path, name: str, tmp_path: Path) -> None:
    for number in ("first", "second"):
        checkpoint = folder / f"{number} of {name}"
        assert main(["export", str(checkpoint), str(tmp_path / number), "--dtype", "float32"]) == 0
    assert_equal(*(load_file(tmp_path / number / "model.safetensors") for number in ("first", "second")))
    configs = [json.loads((tmp_path / number / "config.json").read_text()) for number in ("first", "second")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("end", KILLS)
def test_a_kill_while_ranks_write_leaves_the_last_checkpoint(folder: Path, end: str) -> None:
    """Of one rank as it writes its part, which ends the other rank's save; and of the rank that completes the checkpoint."""
    checkpoints = folder / "ends" / end
    [checkpoint] = complete_checkpoints(checkpoints)
    check_checksums(checkpoint)
    assert_equal(read(checkpoint / "weights"), read(folder / "first of fsdp qwen3_moe" / "weights"))
    others = [path.name for path in checkpoints.iterdir() if path != checkpoint]
    if end == "rank 1":
        assert (checkpoints.parent / f"{end}.txt").read_text(), "rank 0 noticed it"
        assert others == []
    else:
        assert others == ["step_000002.partial"]


def test_a_checkpoint_without_a_hugging_face_folder_says_what_to_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = folder / "first of mixtral"
    out = str(tmp_path / "out")
    for words in (
        ["eval", "--checkpoint", checkpoint],
        ["rollout", "--out", out, "--checkpoint", checkpoint],
        ["gateway", "--model", checkpoint],
    ):
        assert main([str(word) for word in words]) == 2
        assert f"agentrl export '{checkpoint}' my-policy" in capsys.readouterr().err, words
