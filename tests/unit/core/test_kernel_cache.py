"""Where compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.core.kernel_cache import _VARIABLES, kernel_folder, share_kernels


def test_all_are_in_one_folder_of_the_user_unless_a_variable_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert kernel_folder() == Path("/home/me/.cache/agentrl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    share_kernels()
    folders = {name: os.environ[name] for name in _VARIABLES}
    for name in _VARIABLES:  # for the tests that follow
        monkeypatch.delenv(name)
    assert folders.pop("TRITON_CACHE_DIR") == "/of/the/user"
    assert {Path(folder).parent for folder in folders.values()} == {tmp_path / "agentrl"}
    assert len(set(folders.values())) == len(folders)
