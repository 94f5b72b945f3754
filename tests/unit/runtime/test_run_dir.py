"""Which folder a run takes, what a new run may not overwrite, and the lock on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.runtime.run_dir import SFT, check_new, folder_to_resume, locked, new_folder
from tests.unit.core.test_atomic_files import full_disk_after


def made(folder: Path, *, results: str | None = "metrics", checkpoint_ns: int | None = None) -> Path:
    """A run's folder: with its configuration, with metrics or rollouts, and with a checkpoint of a given time."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("run: {seed: 0}\n")
    if results == "metrics":
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    elif results is not None:
        (folder / results).mkdir()
        (folder / results / "step_000001.jsonl").write_text("{}\n")
    if checkpoint_ns is not None:
        state = folder / "checkpoints" / "step_000001" / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text("{}")
        os.utime(state, ns=(checkpoint_ns, checkpoint_ns))
    return folder


def test_the_newest_run_with_a_checkpoint_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--resume: no run under \S+/runs has a checkpoint; set run\.dir"):
        folder_to_resume(None, None)
    runs = Path("runs")
    newest = made(runs / "single_turn-1", checkpoint_ns=20)
    made(runs / "single_turn-2", checkpoint_ns=10)
    older = made(runs / "search_r1-3", checkpoint_ns=15)
    made(runs / "single_turn-4", results=None)  # a start that failed
    made(runs / "single_turn-5", results="rollouts")
    made(new_folder(load_config(None, []), SFT), checkpoint_ns=30)
    assert folder_to_resume(None, None) == newest
    assert folder_to_resume(None, "search_r1") == older
    with pytest.raises(ConfigError, match="no run of python_math under"):
        folder_to_resume(None, "python_math")


def test_runs_that_start_in_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20261128-120000")
    config = load_config(None, [])
    stem = f"{config.label}-20261128-120000"
    assert [new_folder(config).name for _ in range(3)] == [stem, f"{stem}-2", f"{stem}-3"]
    (tmp_path / "file").touch()
    monkeypatch.setattr("agentrl.runtime.run_dir.RUNS", Path("file"))
    with pytest.raises(ConfigError, match=rf"run\.dir=file/{stem} cannot be written: Not a directory"):
        new_folder(config)


def test_a_mistyped_folder_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    made(tmp_path / "good", checkpoint_ns=1)
    with pytest.raises(ConfigError, match=r"run\.dir=\S+/goood is no run.*: \S+/good$"):
        folder_to_resume(str(tmp_path / "goood"), None)
    assert not (tmp_path / "goood").exists()
    assert folder_to_resume(str(tmp_path / "good"), "another_env") == tmp_path / "good"


@pytest.mark.parametrize("results", ["metrics", "rollouts"])
def test_results_without_a_checkpoint_are_not_overwritten(tmp_path: Path, results: str) -> None:
    run = made(tmp_path / "run", results=results)
    with pytest.raises(ConfigError, match=r"no whole checkpoint.*--config \S+/run/config\.yaml"):
        folder_to_resume(str(run), None)
    with pytest.raises(ConfigError, match=r"run\.dir=\S+ already has a run; add --resume"):
        check_new(run)


def test_a_start_that_failed_may_begin_again(tmp_path: Path) -> None:
    run = made(tmp_path / "run", results=None)
    (run / "metrics.jsonl").touch()
    (run / "rollouts").mkdir()
    check_new(run)
    assert folder_to_resume(str(run), None) == run
    assert new_folder(load_config(None, [f"run.dir={run}"])) == run


HOLD = """
import sys
from pathlib import Path
from agentrl.runtime.run_dir import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_is_refused_and_free_again_after_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        message = rf"run\.dir=\S+/run is in use by process {holder.pid} on \S+ since .*; set another run\.dir"
        with pytest.raises(ConfigError, match=message), locked(tmp_path / "run"):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked(tmp_path / "run"):
        assert f"process {os.getpid()} " in (tmp_path / "run" / "lock").read_text()
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with locked(tmp_path / "run"):  # a child that outlives the run, such as an engine, does not hold it
        child.communicate(b"")


def test_a_full_disk_is_named_with_the_lock(tmp_path: Path) -> None:
    with full_disk_after(0), pytest.raises(OSError, match="too large") as raised, locked(tmp_path):
        pass
    assert raised.value.filename == str(tmp_path / "lock")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"run\.dir=\S+/file/run cannot be written"),
        locked(tmp_path / "file" / "run"),
    ):
        pass
