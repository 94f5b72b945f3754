"""The checkpoints of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.core.errors import CheckpointError
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state, whole_checkpoints


class FolderLearner:
    """Saves nothing but a file with a number."""

    def __init__(self) -> None:
        self.number = 0

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "learner.json").write_text(str(self.number))


def test_the_newest_stay_and_states_come_back(tmp_path):
    learner, checkpoints = FolderLearner(), Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 10, 1_000_000):
        learner.number = step
        checkpoints.save(step, learner, {"step": step, "position": 3 * step})
    names = [path.name for path in whole_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step_000010", "step_1000000"]
    latest = latest_checkpoint(tmp_path / "checkpoints")
    assert (latest / "learner.json").read_text() == "1000000"
    state = read_state(latest)
    assert (state["step"], state["position"]) == (1_000_000, 3_000_000)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names


def test_what_a_kill_left_half_written_goes_with_the_next_checkpoint(tmp_path):
    for name in ("step_000002.partial", "step_000001.old.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("")
    Checkpoints(tmp_path, keep=2).save(3, FolderLearner(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    class Full(FolderLearner):
        def save(self, folder):
            super().save(folder)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        Checkpoints(tmp_path, keep=2).save(3, Full(), {})
    assert list(tmp_path.iterdir()) == []


def test_the_drivers_state_can_be_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(1, FolderLearner(), {"evaluated": 0})
    checkpoints.save_state(1, {"evaluated": 1})
    assert read_state(path)["evaluated"] == 1
    assert sorted(file.name for file in path.iterdir()) == ["learner.json", "state.json"]


def test_the_checkpoint_that_the_run_resumed_from_is_kept(tmp_path):
    Checkpoints(tmp_path, keep=2).save(1, FolderLearner(), {})
    checkpoints = Checkpoints(tmp_path, keep=2, began_with=latest_checkpoint(tmp_path))
    for step in (2, 3, 4, 5):
        checkpoints.save(step, FolderLearner(), {})
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step_000001", "step_000004", "step_000005"]


def test_random_states_of_the_driver_come_back(tmp_path):
    path = Checkpoints(tmp_path, keep=1).save(1, FolderLearner(), {})
    drawn = (torch.rand(2).tolist(), np.random.rand(), random.random())
    read_state(path)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == drawn


def test_a_step_saved_again_replaces_the_older(tmp_path):
    learner, checkpoints = FolderLearner(), Checkpoints(tmp_path, keep=3)
    checkpoints.save(4, learner, {"try": 1})
    learner.number = 7
    path = checkpoints.save(4, learner, {"try": 2})
    assert read_state(path)["try"] == 2
    assert (path / "learner.json").read_text() == "7"
    assert [child.name for child in tmp_path.iterdir()] == ["step_000004"]


def test_half_written_folders_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    whole = checkpoints.save(3, FolderLearner(), {})
    (tmp_path / "step_000004.partial").mkdir()
    (tmp_path / "step_000004.partial" / "state.json").write_text("{}")
    (tmp_path / "step_000005").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) == whole


def test_no_checkpoint_is_none_and_a_broken_state_is_an_error(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    for text in (None, "{", "{}"):
        if text is not None:
            (tmp_path / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            read_state(tmp_path)


def test_a_learner_that_fails_leaves_the_older_checkpoint(tmp_path):
    class Failing(FolderLearner):
        def save(self, folder: Path) -> None:
            super().save(folder)
            raise OSError("disk full")

    checkpoints = Checkpoints(tmp_path, keep=1)
    whole = checkpoints.save(1, FolderLearner(), {})
    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(2, Failing(), {})
    assert latest_checkpoint(tmp_path) == whole
    checkpoints.save(2, FolderLearner(), {})
    assert latest_checkpoint(tmp_path).name == "step_000002"


WRITER = """
import sys
from pathlib import Path
from agentrl.learner.checkpoints import Checkpoints

class Learner:
    def save(self, folder):
        folder.mkdir()
        for number in range(20):
            (folder / f"part_{number}").write_bytes(bytes([number]) * 50_000)

checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
step = 0
while True:
    step += 1
    checkpoints.save(step, Learner(), {"step": step})
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_the_last_checkpoint_whole(tmp_path):
    """One writer after the other is killed at a random moment, each going on in the same folder."""
    rng = random.Random(5)
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(3):
            reported = int(writer.stdout.readline())
        time.sleep(rng.uniform(0, 0.05))
        os.kill(writer.pid, signal.SIGKILL)
        lines = writer.stdout.read().split()
        writer.wait()
        reported = int(lines[-1]) if lines else reported
        latest = latest_checkpoint(tmp_path)
        step = json.loads((latest / "state.json").read_text())["step"]
        assert step >= reported
        assert latest.name == f"step_{step:06d}"
        for number in range(20):
            assert (latest / f"part_{number}").read_bytes() == bytes([number]) * 50_000
        for path in [latest, *whole_checkpoints(tmp_path)]:
            if path.exists():
                for part in path.iterdir():
                    part.unlink()
                path.rmdir()
