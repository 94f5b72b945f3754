"""A damaged checkpoint at a resume: the one before it is named."""

from __future__ import annotations

from pathlib import Path

from agentrl.core.errors import CheckpointError
from agentrl.learner.checkpoints import STATE
from agentrl.train.run import _with_older


def test_the_checkpoint_before_a_damaged_one_is_named(tmp_path: Path) -> None:
    older, newest = (tmp_path / "checkpoints" / f"step_{step:06d}" for step in (2, 4))
    for folder in (older, newest):
        folder.mkdir(parents=True)
        (folder / STATE).write_text("{}")
    error = CheckpointError(f"{newest}/state.json is damaged")
    actual = str(_with_older(error, tmp_path, newest, None))
    assert f"The one before it is {older}: move step_000004 away, then" in actual
    assert f"agentrl train --resume run.dir={tmp_path}" in actual
    samples = Path("samples.jsonl")
    assert f"run.dir={tmp_path} --replay {samples}" in str(_with_older(error, tmp_path, newest, samples))
    assert _with_older(CheckpointError("another file"), tmp_path, newest, None).args == ("another file",)
    (older / STATE).unlink()
    assert _with_older(error, tmp_path, newest, None) is error
