"""A damaged checkpoint: its file is named, and the one before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.checksums import CHECKSUMS, check_checksums
from agentrl.core.errors import CheckpointError, ConfigError, OtherKeysError
from agentrl.evaluation.checkpoint_model import checkpoint_model
from agentrl.learner.checkpoints import STATE, Checkpoints, complete_checkpoints, read_state, saved_score
from agentrl.self_play.snapshots import SnapshotFolder
from agentrl.testing import FakeLearner
from agentrl.train.resume import check_resume, with_older


def test_the_checkpoint_before_a_damaged_one_is_named(tmp_path: Path) -> None:
    older, newest = (tmp_path / "checkpoints" / f"step_{step:06d}" for step in (2, 4))
    for folder in (older, newest):
        folder.mkdir(parents=True)
        (folder / STATE).write_text("{}")
    error = CheckpointError(f"{newest}/state.json is damaged")
    actual = str(with_older(error, tmp_path, newest, None))
    assert f"The one before it is {older}: move step_000004 away, then" in actual
    assert f"agentrl train --resume run.dir={tmp_path}" in actual
    samples = Path("samples.jsonl")
    assert f"run.dir={tmp_path} --replay {samples}" in str(with_older(error, tmp_path, newest, samples))
    assert with_older(CheckpointError("another file"), tmp_path, newest, None).args == ("another file",)
    other_keys = OtherKeysError(f"{newest} was written with another optimizer")
    assert with_older(other_keys, tmp_path, newest, None) is other_keys, "the older one would not fit either"
    (older / STATE).unlink()
    assert with_older(error, tmp_path, newest, None) is error


class Learner(FakeLearner):
    """Writes the files of a model, and others."""

    def save(self, folder: Path) -> None:
        for name in ("model/model.safetensors", "optimizer/.metadata", "random/rank_00000.pt", "policies/a/weights"):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_bytes(bytes(range(1, 256)) * 1024)
        (folder / "model" / "config.json").write_text("{}")


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Those of a run, the newest last."""
    writer = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    for step in (2, 4):
        writer.save(step, Learner(), {"step": step})
        writer.finish()
    return complete_checkpoints(writer.folder)


def zero(path: Path) -> None:
    """Zero up to 64 KiB in the middle of a file, whose size stays."""
    data = path.read_bytes()
    start, end = len(data) // 3, min(len(data), len(data) // 3 + 65536)
    path.write_bytes(data[:start] + bytes(end - start) + data[end:])


def cut(path: Path) -> None:
    """Cut the last byte off."""
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [zero, cut, Path.unlink])
def test_damage_of_any_file_of_a_checkpoint_is_noticed(
    checkpoints: list[Path], damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = checkpoints
    check_checksums(newest)
    files = [path for path in newest.rglob("*") if path.is_file() and path.name not in (STATE, CHECKSUMS)]
    assert len(files) == 5
    for path in files:
        whole = path.read_bytes()
        damage(path)
        with pytest.raises(CheckpointError, match=str(path)):
            check_checksums(newest)
        in_model = path.relative_to(newest).parts[0] in ("model", "policies") and path.name != "config.json"
        for source in (newest, tmp_path / "run") if in_model else ():
            with pytest.raises(CheckpointError, match=rf"{path} .*\. The checkpoint before it is {older}"):
                checkpoint_model(str(source))
            assert main(["export", str(source), str(tmp_path / "out")]) == 1
            assert str(older) in capsys.readouterr().err
        path.write_bytes(whole)
    check_checksums(newest)
    assert not (tmp_path / "out").exists()


def test_a_state_with_another_digit_is_refused(checkpoints: list[Path], tmp_path: Path) -> None:
    """A smaller position would train tasks twice, a smaller step would train steps twice."""
    writer = Checkpoints(tmp_path / "run" / "checkpoints", keep=2)
    newest = writer.save(6, Learner(), {"step": 6, "position": 12, "keys": {}, "score": 0.5})
    writer.finish()
    writer.update_state(6, {"score": 0.75})
    path = newest / STATE
    content = path.read_text()
    assert "resumes from step 6: weights, optimizer, random states, 12 tasks" in check_resume(tmp_path / "run", {})
    assert saved_score(newest) == 0.75
    changes = [('"position": 12', '"position": 11'), ('"step": 6', '"step": 4'), ('"score": 0.75', '"score": "x"')]
    for before, after in changes:
        assert before in content
        path.write_text(content.replace(before, after))
        for read in (lambda: check_resume(tmp_path / "run", {}), lambda: read_state(newest)):
            with pytest.raises(CheckpointError, match=f"{path} is damaged: it is not as it was written"):
                read()
        assert saved_score(newest) is None
    (tmp_path / "run" / "snapshots").mkdir()
    SnapshotFolder(tmp_path / "run").remove_all_except(["step_000000"])  # a damaged state does not end a run


def test_a_newest_checkpoint_without_its_state_is_not_passed_over(checkpoints: list[Path], tmp_path: Path) -> None:
    """As of a copy of a run that was broken off."""
    older, newest = checkpoints
    (newest / STATE).unlink()
    with pytest.raises(CheckpointError, match=rf"{newest / STATE} cannot be read.*The one before it is {older}: move"):
        check_resume(tmp_path / "run", {})


def test_a_snapshot_of_the_pool_that_is_gone_is_named_before_the_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    writer = Checkpoints(run / "checkpoints", keep=2)
    source = {"self_play": {"snapshots": [0, 5]}}
    writer.save(6, Learner(), {"step": 6, "position": 12, "keys": {}, "source": source})
    writer.finish()
    keys = {"self_play.mix.past": "0.5"}
    for name in ("step_000000", "step_000005"):
        with pytest.raises(ConfigError, match=f"{run / 'snapshots' / name} is missing: the pool of .*step_000006 has"):
            check_resume(run, keys)
        (run / "snapshots" / name).mkdir(parents=True)
    assert "resumes from step 6" in check_resume(run, keys)
    (run / "snapshots" / "step_000000").rmdir()
    assert "resumes from step 6" in check_resume(run, {"self_play.mix.mirror": "1.0"}), "no snapshot plays"
