"""Atomic writing of files and folders: written next to their final path, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a path that is being written, or was left by a killed process."""


def partial_path(folder: Path) -> Path:
    """Return the path to write to before the rename to ``folder``: in the same parent, so that renaming is atomic."""
    return folder.with_name(folder.name + PARTIAL)


def publish(partial: Path, folder: Path) -> None:
    """Sync ``partial`` to the disk and rename it to ``folder``; an older ``folder`` is replaced."""
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if folder.exists():
        old = folder.with_name(folder.name + ".old" + PARTIAL)
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        os.replace(partial, folder)
        shutil.rmtree(old)
    else:
        os.replace(partial, folder)
    _sync(folder.parent)


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces the file ``path`` when the block ends without an error."""
    partial = partial_path(path)
    yield partial
    os.replace(partial, path)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read (mode 0600), atomically; it holds secrets."""
    with write_atomically(path) as partial:
        partial.unlink(missing_ok=True)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
