"""Trackers; Weights & Biases is the real one, offline: nothing is sent anywhere."""

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import wait_until

from agentrl.config.obs import ObsConfig
from agentrl.core.errors import MissingError
from agentrl.core.types import FinishReason, Rollout, StopReason, Turn
from agentrl.obs import trackers as ours
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.trackers import COLUMNS, TensorBoard, markdown, sample_table


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def rollout(number: int, text: str = "<search> a|b </search>\nc") -> Rollout:
    turns = [Turn(text, " found", FinishReason.STOP), Turn(" done", "", FinishReason.STOP)]
    return Rollout(f"t{number}", f"r{number}", [], 0.5, StopReason.TERMINATED, turns=turns, prompt="Who?", label=["me"])


class RecordingTracker:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, dict(metrics)))

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        self.calls.append((step, [line[0] for line in table]))

    def close(self) -> None:
        self.calls.append("closed")


def test_every_tracker_receives_the_metrics_of_the_file(tmp_path: Path) -> None:
    trackers = [RecordingTracker(), RecordingTracker()]
    with MetricsLog(tmp_path, trackers=trackers, table_rows=2) as log:
        log.write(1, {"a": 0.5})
        log.samples(1, [rollout(number) for number in range(5)])
    for tracker in trackers:
        assert tracker.calls == [(1, {"a": 0.5}), (1, ["t0", "t2"]), "closed"]
    quiet = RecordingTracker()
    with MetricsLog(tmp_path / "quiet", trackers=[quiet], table_rows=0) as log:
        log.samples(1, [rollout(0)])
    assert quiet.calls == ["closed"]


def test_a_sample_is_shown_whole() -> None:
    [line] = sample_table([rollout(1)], 8)
    shown = dict(zip(COLUMNS, line, strict=True))
    assert shown["prompt"] == "Who?"
    assert shown["response"] == "<search> a|b </search>\nc found done"
    assert (shown["label"], shown["reward"], shown["stop reason"]) == ("['me']", 0.5, "terminated")
    table = markdown([line]).splitlines()
    assert len(table) == 3
    assert {row.count("|") for row in table} == {len(COLUMNS) + 1}, "no text breaks a cell"
    assert "&lt;search&gt; a&#124;b" in table[2]


def test_tensorboard_gets_metrics_and_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, trackers=[TensorBoard(tmp_path / "board", print)], table_rows=2) as log:
        log.write(3, {"train/reward": 0.25})
        log.samples(3, [rollout(0)])
    event_accumulator = EventAccumulator(str(tmp_path / "board"))
    event_accumulator.Reload()
    [scalar] = event_accumulator.Scalars("train/reward")
    assert (scalar.step, scalar.value) == (3, 0.25)
    [text] = event_accumulator.Tensors("samples/text_summary")
    assert b"terminated" in text.tensor_proto.string_val[0]


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    notes: list[str] = []
    with MetricsLog(tmp_path, trackers=[TensorBoard(tmp_path / "board", notes.append)], table_rows=1) as log:
        for step in (1, 2):
            log.write(step, {"train/reward": 0.25})
            log.samples(step, [rollout(0)])
    [note] = notes
    assert f"nothing more of this run: {tmp_path / 'board'}: [Errno 28] No space left" in note
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_resumed_run_keeps_its_id_and_leaves_no_process(tmp_path: Path) -> None:
    import wandb

    notes: list[str] = []
    processes_before = set(psutil.Process().children(recursive=True))
    ids = []
    for step in (1, 2):
        obs = ObsConfig(
            wandb="online", wandb_project="tests", wandb_group="seeds", wandb_tags=["a", "b"], wandb_entity="us"
        )
        tracker = ours.open_wandb(
            tmp_path, obs, config={"run": {"seed": 3}}, note=notes.append
        )  # WANDB_MODE=offline goes before online
        assert tracker is not None
        assert wandb.run is not None
        assert (wandb.run.group, wandb.run.tags, wandb.run.entity) == ("seeds", ("a", "b"), "us")
        ids.append(wandb.run.id)
        with MetricsLog(tmp_path, trackers=[tracker], table_rows=1, resume_after=step - 1) as log:
            log.write(step, {"train/reward": step / 4})
            log.samples(step, [rollout(step)])
        ended = int(time.time())
        wait_until(lambda ended=ended: int(time.time()) > ended)  # its folders are named by the second
    assert ids[0] == ids[1] == ours.run_id(tmp_path)
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{ids[0]}"))) == 2
    first, second = (path.read_bytes() for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")))
    for written, value in ((first, b"0.25"), (second, b"0.5")):
        assert b"train/reward" in written
        assert value in written
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert sorted(line[1] for table in tables for line in table["data"]) == ["t1", "t2"]
    assert set(psutil.Process().children(recursive=True)) <= processes_before


def test_a_copied_run_gets_an_id_of_its_own_and_a_moved_one_keeps_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    first = ours.run_id(run)
    assert ours.run_id(run) == first
    shutil.copytree(run, tmp_path / "copy")
    copied = ours.run_id(tmp_path / "copy")
    assert copied != first
    assert ours.run_id(tmp_path / "copy") == copied
    assert ours.run_id(run) == first
    run.rename(tmp_path / "moved")
    assert ours.run_id(tmp_path / "moved") == first


def test_online_without_a_key_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    notes: list[str] = []
    opened = ours.open_wandb(tmp_path, ObsConfig(wandb="online"), config={}, note=notes.append)
    assert opened is None
    assert "WANDB_API_KEY" in notes[0]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    assert ours.has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not ours.has_key()


def test_disabled_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    notes: list[str] = []
    assert ours.open_wandb(tmp_path, ObsConfig(wandb="offline"), config={}, note=notes.append) is None
    assert "WANDB_MODE=disabled" in notes[0]


def test_without_the_package_the_message_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        MissingError, match=r"obs\.wandb=offline needs the package wandb: pip install 'agentrl-framework\[wandb\]'"
    ):
        ours.open_wandb(tmp_path, ObsConfig(wandb="offline"), config={}, note=print)


def test_a_tracker_that_fails_is_reported_once_and_ends_nothing() -> None:
    class Broken:
        def log(self, data: Mapping[str, Any]) -> None:
            raise OSError("no space left")

        def finish(self) -> None:
            raise AssertionError("not asked again")

    notes: list[str] = []
    tracker = ours.Wandb(Broken(), notes.append)
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 1.0})
    tracker.close()
    assert len(notes) == 1
    assert "no space left" in notes[0]
