"""What agentrl writes can be read by whoever the umask lets read; safetensors writes for the owner alone."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agentrl_tasks.small_policy import save_policy
from safetensors.torch import save_file

from agentrl.core.atomic_files import give_default_mode
from agentrl.distributed.base import TensorSpec
from agentrl.learner.export import BucketPlan, RankBucket
from agentrl.models.random_models import SHAPES, write_random_model

ROOT = Path(__file__).parents[3]


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    umask_before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(umask_before)


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()}


def test_a_file_gets_the_mode_of_a_new_one(tmp_path: Path, mode: int) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    (tmp_path / "one.safetensors").chmod(0o600)
    give_default_mode(tmp_path / "one.safetensors")
    assert modes(tmp_path) == {mode}
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_models_and_buckets_get_it(tmp_path: Path, mode: int) -> None:
    write_random_model(tmp_path / "random", SHAPES["tiny"], weights=True)
    save_policy(tmp_path / "small", ["one two"], vocabulary=300)
    bucket: Any = SimpleNamespace(on_cpu=lambda size: torch.zeros(size, dtype=torch.uint8))
    spec = TensorSpec("w", "float32", (2,))
    RankBucket(BucketPlan((spec,), 8, True), bucket, bucket, bucket).save(tmp_path / "bucket.safetensors")
    assert modes(tmp_path) == {mode}


def test_every_module_that_writes_weights_sees_to_their_mode() -> None:
    writers = []
    for top in ("agentrl", "envs", "tools", "tasks"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text()
            # A model's configuration is written with the default mode; the learner's weights are, by `open`.
            of_models = ".save_pretrained(" in text.replace("config.save_pretrained(", "")
            saves = "save_file(" in text or (of_models and "tokenizer" not in path.name)
            if saves:
                writers.append(path.name)
                assert "give_default_mode(" in text, path
    assert {"export.py", "random_models.py", "smollm2.py", "model.py"} <= {*writers}


def test_files_of_packages_can_be_read_as_the_rest_of_the_repository() -> None:
    readers = (ROOT / "pyproject.toml").stat().st_mode & 0o444
    weights = [path for top in ("agentrl", "tasks", "envs", "tools") for path in (ROOT / top).rglob("*.safetensors")]
    assert len(weights) >= 4
    assert {path.stat().st_mode & 0o444 for path in weights} == {readers}
