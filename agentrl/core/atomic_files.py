"""Atomic writing: files and folders are written next to their final path, then renamed; lines are appended as a whole or not.

Errors of the file system name the file, which those of writing alone do not.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of a path that is being written, or was left by a killed process."""
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)
"""Faults of the disk that the user can mend: full, over its quota, read-only, a limit on the size of files, no permission, a
device or a server of files that fails; and of a path: a file in place of a folder, or the reverse, or a name that is too long."""

_RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Put ``path`` into an OSError of the body that names no file, such as that of a write to a full disk.

    Torch's writers put a RuntimeError in its place, without its words, and safetensors an error with its number; an OSError is
    raised in their place.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        cause = error.__context__
        if match := _RUST_OS_ERROR.search(str(error)):
            number: int | None = int(match[1])
        else:
            number = cause.errno if isinstance(error, RuntimeError) and isinstance(cause, OSError) else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


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
    """Yield a path to write to, which replaces the file ``path`` when the block ends without an error, and else is removed.

    Its content is on the disk before: after a failure of the machine ``path`` is the old file or the new one as a whole.
    """
    partial = partial_path(path)
    try:
        with names_file(path):
            yield partial
            _sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes) -> int:
    """Append ``data`` to a file, which is created if it is not there, and return the size before.

    The file is as before if not all of it can be written.

    Raises:
        OSError: such as of a full disk; it names the file.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        return append_to(handle, path, data)
    finally:
        os.close(handle)


def append_to(handle: int, path: Path, data: bytes) -> int:
    """Append ``data`` to the open file ``path``, as `append` does."""
    size, written = os.fstat(handle).st_size, 0
    with names_file(path):
        try:
            while written < len(data):
                written += os.write(handle, data[written:] if written else data)
        except BaseException:
            if written:
                os.ftruncate(handle, size)
            raise
    return size


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
        with names_file(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def give_default_mode(*files: Path) -> None:
    """Give files the mode of a new file in their folder, which the umask sets.

    safetensors writes for the owner only, whatever the umask: an engine or a colleague with another user id could not read
    the weights.
    """
    for file in files:
        probe = file.with_name(f".{file.name}.mode")
        probe.touch()
        shutil.copymode(probe, file)
        probe.unlink()
