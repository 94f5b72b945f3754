"""Files that are appended to and replaced on a disk that becomes full."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.core.atomic_files import append, names_file, write_atomically
from agentrl.obs.journal import JOURNAL, LOG, JournalLog, read_journal


@contextmanager
def full_disk_after(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: a write is cut there, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def append_line(path: Path) -> None:
    append(path, b"0123456789\n")


def write_record(path: Path) -> None:
    log = JournalLog(path.parents[1])
    try:
        log.write("trained", step=1)
    finally:
        log.close()


def test_a_full_disk_under_safetensors_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with full_disk_after(100), pytest.raises(OSError, match=r"File too large") as error, names_file(path):
        save_file({"weight": np.zeros(1000)}, path)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(ValueError, match="of the caller"), names_file(path):
        raise ValueError("of the caller")


@pytest.mark.parametrize(("file", "write"), [("lines", append_line), (f"{JOURNAL}/{LOG}", write_record)])
def test_a_line_is_written_as_a_whole_or_not_at_all_wherever_the_disk_is_full(
    tmp_path: Path, file: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    write(path)
    before = path.read_bytes()
    for size in range(len(before), 2 * len(before) - 4):
        with full_disk_after(size), pytest.raises(OSError, match=r"File too large") as error:
            write(path)
        assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
        assert path.read_bytes() == before
    write(path)
    assert path.read_bytes()[: len(before)] == before
    assert len(path.read_bytes().splitlines()) == 2


def test_the_journal_goes_on_after_a_disk_that_was_full_for_a_moment(tmp_path: Path) -> None:
    log = JournalLog(tmp_path)
    log.write("begin", step=0, first=0, ahead=[], keys={}, discards=False)
    with full_disk_after((tmp_path / JOURNAL / LOG).stat().st_size + 30), pytest.raises(OSError, match="too large"):
        log.write("trained", step=1)
    log.write("trained", step=1)
    log.close()
    state = read_journal(tmp_path)
    assert state is not None
    assert state.trained == 1


def test_a_file_that_cannot_be_replaced_stays_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_disk_after(2), pytest.raises(OSError, match="too large") as error, write_atomically(path) as partial:
        partial.write_text("new text")
    assert error.value.filename == str(path)
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "file", list[str]()
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle: int) -> None:
        events.append(f"fsync {os.readlink(f'/proc/self/fd/{handle}')}")
        fsync(handle)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"replace {source}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with write_atomically(path) as partial:
        partial.write_text("new")
    assert events == [f"fsync {partial}", f"replace {partial}"]
