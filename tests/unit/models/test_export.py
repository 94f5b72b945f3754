"""Export of a checkpoint's model, and safetensors files that are written part by part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl.distributed.base import tensor_spec
from agentrl.models.export import check_free, export_model
from agentrl.models.load import load_model
from agentrl.models.weight_files import WeightFiles
from agentrl.models.weight_writer import WeightWriter
from tests.unit.learner.learners import make_model


def test_a_checkpoint_is_exported(tmp_path: Path) -> None:
    model = make_model(tmp_path / "step_000003" / "model", "llama")
    assert main(["export", str(tmp_path / "step_000003"), str(tmp_path / "out")]) == 0
    actual, expected = load_model(tmp_path / "out", "bfloat16"), load_model(model, "bfloat16")
    assert actual.config.dtype is torch.bfloat16
    assert all(torch.equal(value, actual.state_dict()[name]) for name, value in expected.state_dict().items())
    assert {value.dtype for value in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_large_model_gets_several_files_and_an_index(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen2")
    export_model(model, tmp_path / "out", "float32", file_bytes=10_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3
    expected = load_model(model).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in load_model(tmp_path / "out").state_dict().items())


def test_a_folder_with_files_or_without_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="holds files"):
        export_model(model, model, "bfloat16")
    (model / "model.safetensors").unlink()
    assert main(["export", str(model), str(tmp_path / "out")]) == 2
    assert "holds no safetensors files" in capsys.readouterr().err
    file = tmp_path / "notes.txt"
    file.touch()
    for out in (file, file / "model"):
        with pytest.raises(ConfigError, match=r"notes\.txt is a file"):
            check_free(out)


def test_parts_of_any_shape_and_dtype_are_written_in_any_order(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(35.0).view(7, 5),
        "b": torch.tensor(3, dtype=torch.int64),
        "c": torch.zeros(0, 4),
        "d": torch.arange(6).to(torch.bfloat16),
        "e": torch.arange(60, dtype=torch.int16).view(4, 3, 5),
    }
    writer = WeightWriter(tmp_path, [tensor_spec(*item) for item in tensors.items()])
    writer.create()
    for name, offsets, sizes in [
        ("d", (4,), (2,)), ("a", (3, 0), (4, 5)), ("b", (), ()), ("e", (1, 1, 0), (3, 2, 5)), ("a", (0, 2), (3, 3)),
        ("d", (0,), (4,)), ("e", (0, 0, 0), (1, 3, 5)), ("e", (1, 0, 0), (3, 1, 2)), ("a", (0, 0), (3, 2)),
        ("e", (1, 0, 2), (3, 1, 3)), ("c", (0, 0), (0, 4)),
    ]:  # fmt: skip
        part = tensors[name][tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        writer.write_part(name, part, offsets)
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    files = WeightFiles(tmp_path, "model.path")
    assert files.specs() == [tensor_spec(*item) for item in tensors.items()]
    assert torch.equal(files.read("a", (slice(2, 4), slice(0, 5))), tensors["a"][2:4])
