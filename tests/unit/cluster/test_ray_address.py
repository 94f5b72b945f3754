"""Which Ray of this machine is joined."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cluster.ray_address import running_address


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """The note of a Ray that answers, and its address."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as answering:
        note, address = tmp_path / "ray" / "ray_current_cluster", f"127.0.0.1:{answering.getsockname()[1]}"
        note.parent.mkdir()
        note.write_text(f"{address}\n")
        yield note, address


def test_ones_own_is_joined_if_it_answers(ray: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    note, address = ray
    assert running_address() == address
    note.write_text("127.0.0.1:1")
    assert running_address() is None
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert running_address() == "10.0.0.1:6379"


def test_that_of_another_user_is_not(
    ray: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert running_address() is None
    assert f"{ray[0]} is not of this user" in caplog.text


@pytest.mark.parametrize("kind", ["link", "queue", "folder", "text", "nothing"])
def test_what_is_no_note_is_not_read(ray: tuple[Path, str], kind: str) -> None:
    note, address = ray
    note.unlink()
    if kind == "link":
        (note.parent / "elsewhere").write_text(address)
        note.symlink_to("elsewhere")
    elif kind == "queue":
        os.mkfifo(note)
    elif kind == "folder":
        note.mkdir()
    elif kind == "text":
        note.write_bytes(b"\xff" * 10_000)
    assert running_address() is None
