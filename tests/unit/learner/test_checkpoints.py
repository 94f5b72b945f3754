"""The checkpoints of a run."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import wait
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest
import torch
from preloaded import Forked, Request

from agentrl.core.background import run_in_daemon_thread
from agentrl.core.errors import CheckpointError
from agentrl.learner.checkpoints import Checkpoints, begin_random, complete_checkpoints, latest_checkpoint, read_state
from agentrl.learner.random_states import rank_states, save_rank_states
from tests.unit.core.test_atomic_files import full_disk_after
from tests.unit.learner.learners import Learners, make_batch


class FolderLearner:
    """Saves nothing but a file with a number."""

    def __init__(self) -> None:
        self.number = 0

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "learner.json").write_text(str(self.number))

    def finish_save(self) -> None:
        pass


def saved(checkpoints: Checkpoints, step: int, learner: FolderLearner | None = None, state: object = None) -> Path:
    """Write a checkpoint, and wait until it is complete."""
    path = checkpoints.save(step, learner or FolderLearner(), state or {})
    checkpoints.finish()
    return path


def test_the_newest_stay_and_states_come_back(tmp_path):
    learner, checkpoints = FolderLearner(), Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (5, 10, 1_000_000):
        learner.number = step
        saved(checkpoints, step, learner, {"step": step, "position": 3 * step})
    names = [path.name for path in complete_checkpoints(tmp_path / "checkpoints")]
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
    saved(Checkpoints(tmp_path, keep=2), 3, FolderLearner(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    class Full(FolderLearner):
        def save(self, folder):
            super().save(folder)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        saved(Checkpoints(tmp_path, keep=2), 3, Full(), {})
    assert list(tmp_path.iterdir()) == []


def test_the_drivers_state_can_be_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = saved(checkpoints, 1, FolderLearner(), {"evaluated": 0})
    checkpoints.save_state(1, {"evaluated": 1})
    assert read_state(path)["evaluated"] == 1
    assert sorted(file.name for file in path.iterdir()) == ["checksums.json", "learner.json", "state.json"]


def test_the_checkpoint_that_the_run_resumed_from_is_kept(tmp_path):
    saved(Checkpoints(tmp_path, keep=2), 1, FolderLearner(), {})
    checkpoints = Checkpoints(tmp_path, keep=2, resumed_from=latest_checkpoint(tmp_path))
    for step in (2, 3, 4, 5):
        saved(checkpoints, step, FolderLearner(), {})
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001", "step_000004", "step_000005"]


def test_random_states_of_the_driver_come_back(tmp_path):
    path = saved(Checkpoints(tmp_path, keep=1), 1, FolderLearner(), {})
    drawn = (torch.rand(2).tolist(), np.random.rand(), random.random())
    read_state(path)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == drawn


def test_the_driver_begins_with_the_states_of_the_checkpoint_or_those_of_the_seed(tmp_path):
    state = read_state(saved(Checkpoints(tmp_path, keep=1), 1, FolderLearner(), {}))
    drawn = (torch.rand(2).tolist(), np.random.rand(), random.random())
    for begun in (state, {}):
        begin_random(begun, 5)
        first = (torch.rand(2).tolist(), np.random.rand(), random.random())
        assert (first == drawn) is (begun == state)
        begin_random(begun, 5)
        assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == first


def test_a_step_saved_again_replaces_the_older(tmp_path):
    learner, checkpoints = FolderLearner(), Checkpoints(tmp_path, keep=3)
    saved(checkpoints, 4, learner, {"try": 1})
    learner.number = 7
    path = saved(checkpoints, 4, learner, {"try": 2})
    assert read_state(path)["try"] == 2
    assert (path / "learner.json").read_text() == "7"
    assert [child.name for child in tmp_path.iterdir()] == ["step_000004"]


def test_half_written_folders_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    complete = saved(checkpoints, 3, FolderLearner(), {})
    (tmp_path / "step_000004.partial").mkdir()
    (tmp_path / "step_000004.partial" / "state.json").write_text("{}")
    (tmp_path / "step_000005").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) == complete


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
    complete = saved(checkpoints, 1, FolderLearner(), {})
    with pytest.raises(OSError, match="disk full"):
        saved(checkpoints, 2, Failing(), {})
    assert latest_checkpoint(tmp_path) == complete
    saved(checkpoints, 2, FolderLearner(), {})
    assert latest_checkpoint(tmp_path).name == "step_000002"


class SlowLearner(FolderLearner):
    """Is finished when ``written`` is set, or fails then."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.written = threading.Event()
        self.error = error

    def finish_save(self) -> None:
        self.written.wait()
        if self.error is not None:
            raise self.error


def test_a_checkpoint_is_written_while_training_goes_on(tmp_path):
    checkpoints, learner = Checkpoints(tmp_path, keep=2), SlowLearner()
    rng_state_before = torch.get_rng_state()
    path = checkpoints.save(1, learner, {"step": 1})
    assert latest_checkpoint(tmp_path) is None
    checkpoints.check()
    torch.rand(3)
    learner.written.set()
    checkpoints.finish()
    assert latest_checkpoint(tmp_path) == path
    read_state(path)
    assert torch.equal(torch.get_rng_state(), rng_state_before)


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path):
    checkpoints, slow = Checkpoints(tmp_path, keep=2), SlowLearner()
    checkpoints.save(1, slow, {})
    saving = run_in_daemon_thread(lambda: checkpoints.save(2, FolderLearner(), {}), "second")
    assert not (tmp_path / "step_000002.partial").exists()
    slow.written.set()
    saving.result()
    checkpoints.finish()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000001", "step_000002"]


@pytest.mark.parametrize("act", ["check", "finish", "save", "save_state"])
def test_a_write_that_fails_reaches_the_run_once_and_leaves_the_older_checkpoint(tmp_path, act):
    checkpoints = Checkpoints(tmp_path, keep=1)
    complete = saved(checkpoints, 1)
    failing = SlowLearner(OSError(28, "No space left on device"))
    checkpoints.save(2, failing, {})
    failing.written.set()
    wait([checkpoints._writing])
    with pytest.raises(OSError, match="No space left"):
        {
            "check": checkpoints.check,
            "finish": checkpoints.finish,
            "save": lambda: checkpoints.save(3, FolderLearner(), {}),
            "save_state": lambda: checkpoints.save_state(2, {}),
        }[act]()
    assert list(tmp_path.iterdir()) == [complete]
    checkpoints.finish()
    saved(checkpoints, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"]


def test_the_best_checkpoint_is_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    assert checkpoints.best_score() == float("-inf")
    for step, score in ((1, 0.2), (2, 0.7), (3, None), (4, 0.7), (5, 0.1), (6, None)):
        saved(checkpoints, step, state={"score": score})
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000004", "step_000006"]
    assert checkpoints.best_score() == 0.7


def test_scores_of_another_metric_do_not_count(tmp_path):
    for step, metric in ((1, "searches"), (2, "exact_match"), (3, "exact_match"), (4, "exact_match")):
        checkpoints = Checkpoints(tmp_path, keep=1, metric=metric)
        score = {1: 1.4, 2: 0.6}.get(step, 0.3)
        saved(checkpoints, step, state={"score": score, "score_of": metric})
        assert checkpoints.best_score() == {1: 1.4}.get(step, 0.6)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_000002", "step_000004"]


def start_writer(folder: Path) -> tuple[Forked, TextIO]:
    """Start `checkpoint_writer`; return the process and its output."""
    read, write = os.pipe()
    helper_folder = str(Path(__file__).parent)
    writer = Forked(Request("checkpoint_writer:main", [str(folder)], helper_folder, dict(os.environ), {1: write, 2: 2}))
    os.close(write)
    return writer, open(read)


def test_sigkill_at_any_moment_leaves_the_last_checkpoint_whole(tmp_path):
    """One writer after the other is killed at a random moment, each going on in the same folder."""
    rng = random.Random(5)
    for _ in range(3):
        writer, output = start_writer(tmp_path)
        with output:
            for _ in range(3):
                reported = int(output.readline())
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
            lines = output.read().split()
        writer.wait()
        reported = int(lines[-1]) if lines else reported
        latest = latest_checkpoint(tmp_path)
        step = json.loads((latest / "state.json").read_text())["step"]
        assert step >= reported
        assert latest.name == f"step_{step:06d}"
        for number in range(20):
            assert (latest / f"part_{number}").read_bytes() == bytes([number]) * 50_000
        for path in [latest, *complete_checkpoints(tmp_path)]:
            if path.exists():
                for file_part in path.iterdir():
                    file_part.unlink()
                path.rmdir()


def test_a_full_disk_names_the_file_wherever_the_learner_meets_it(learners: Learners, tmp_path: Path) -> None:
    """Description, weights and the optimizer's shards, which differ in size; and random states, which are smaller."""
    learner, folder = learners.open("adamw"), tmp_path / "full"

    def save() -> None:
        learner.save(folder)
        learner.finish_save()

    learner.train_step(make_batch([30, 20]))
    save()
    sizes = {path.stat().st_size - 1 for path in folder.rglob("*") if path.is_file()}
    writes = [(size, save) for size in sorted(sizes - {-1})]
    writes.append((1000, lambda: save_rank_states(rank_states(torch.device("cpu")), folder / "random")))
    named = set()
    for size, write in writes:
        with full_disk_after(size), pytest.raises(OSError, match="File too large") as error:
            write()
        named.add(Path(error.value.filename2 or error.value.filename).relative_to(folder).parts[:1])
    assert named >= {("model",), ("optimizer",), ("random",)}
