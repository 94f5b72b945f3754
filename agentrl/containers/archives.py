"""Files in and out of machines, as tar archives; what comes out of a machine is hostile until it is checked."""

from __future__ import annotations

import io
import posixpath
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from agentrl.core.errors import UserError

MOST_FILES = 100_000
"""Members of an archive from a machine."""
MOST_DEPTH = 100
"""Folders in the name of a member of such an archive."""


class DownloadError(UserError):
    """Files of a machine that cannot be taken out: none, too large, or too many."""


@dataclass(frozen=True, slots=True)
class Download:
    """Files of a machine.

    Example: of ``/app/out`` the archive has ``out/``, ``out/a.txt``; ``left_out`` might be ``("out/link",)``.
    """

    tar: bytes
    """An archive of regular files, folders, and symbolic links to these, without owners, times and set-user-id bits."""
    left_out: tuple[str, ...]
    """Links that lead out of the folder, devices, sockets and pipes."""

    def files(self) -> dict[str, bytes]:
        """Return the content of the regular files, by their names in the archive."""
        with tarfile.open(fileobj=io.BytesIO(self.tar)) as archive:
            return {member.name: _content(archive, member) for member in archive if member.isreg()}


def pack(files: Path | Mapping[str, bytes], name: str, ids: tuple[int, int], mode: int | None) -> bytes:
    """Return an archive with a file or folder called ``name``.

    Args:
        files: a file or folder of this machine, or contents by relative path, in which case it is a folder.
        name: a relative path; entries for the folders above it are made.
        ids: user and group of everything.
        mode: of regular files; None: as here, or 0644.

    Raises:
        ValueError: a relative path leads out of the folder.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for parent in _parents(name):
            _add(archive, parent, None, 0o755, ids)
        if isinstance(files, Path):
            _add_path(archive, files, name, ids, mode)
        else:
            _add(archive, name, None, 0o755, ids)
            folders: set[str] = set()
            for path, content in sorted(files.items()):
                if path.startswith("/") or ".." in path.split("/"):
                    raise ValueError(f"{path!r} leads out of the folder")
                for parent in _parents(path):
                    if parent not in folders:
                        folders.add(parent)
                        _add(archive, f"{name}/{parent}", None, 0o755, ids)
                _add(archive, f"{name}/{path}", content, 0o644 if mode is None else mode, ids)
    return buffer.getvalue()


def check(chunks: Iterable[bytes], max_bytes: int) -> Download:
    """Return a daemon's archive of a machine's files without what could do harm elsewhere.

    The archive is read as it arrives, and no further than to what is refused.

    Raises:
        DownloadError: its files have more than ``max_bytes``, there are more than `MOST_FILES`, or folders are deeper than
            `MOST_DEPTH`.
    """
    checked, left_out, size = io.BytesIO(), [], 0
    # Headers and padding of small files come on top of their content.
    stream = _Stream(chunks, 2 * max_bytes + 2**20, max_bytes)
    try:
        with (
            tarfile.open(fileobj=stream, mode="r|") as source,
            tarfile.open(fileobj=checked, mode="w") as target,
        ):
            regular: dict[str, tuple[int, int]] = {}
            """Begin and end of files' contents in ``checked``."""
            for number, member in enumerate(source):
                source.members = []  # type: ignore[attr-defined]  # it keeps all of them otherwise
                name = posixpath.normpath(member.name)
                if number >= MOST_FILES:
                    raise DownloadError(f"there are more than {MOST_FILES} files")
                if name.count("/") > MOST_DEPTH:
                    raise DownloadError(f"there are more than {MOST_DEPTH} folders one in the other")
                if name.startswith(("/", "../")) or name == "..":
                    left_out.append(member.name)
                elif member.isdir():
                    _add(target, name, None, member.mode & 0o777, (0, 0))
                elif member.isreg() or (member.islnk() and posixpath.normpath(member.linkname) in regular):
                    first = regular.get(posixpath.normpath(member.linkname)) if member.islnk() else None
                    size += member.size if first is None else first[1] - first[0]
                    if size > max_bytes:
                        raise DownloadError(f"the files have more than {max_bytes} bytes")
                    content = _content(source, member) if first is None else bytes(checked.getbuffer()[slice(*first)])
                    _add(target, name, content, member.mode & 0o777, (0, 0))
                    start = checked.tell() - -(-len(content) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                    regular[name] = first or (start, start + len(content))
                elif member.issym() and _is_inner_link(name, member.linkname):
                    link = tarfile.TarInfo(name)
                    link.type, link.linkname = tarfile.SYMTYPE, member.linkname
                    target.addfile(link)
                else:
                    left_out.append(name)
    except tarfile.TarError as error:
        raise DownloadError(f"the daemon's archive cannot be read: {error}") from error
    return Download(checked.getvalue(), tuple(left_out))


class _Stream(io.RawIOBase):
    """Chunks as a file to be read once, of at most ``limit`` bytes."""

    def __init__(self, chunks: Iterable[bytes], limit: int, max_bytes: int) -> None:
        self._chunks = iter(chunks)
        self._buffer = bytearray()
        self._left = limit
        self._max_bytes = max_bytes

    @override
    def read(self, size: int = -1) -> bytes:
        while len(self._buffer) < size and (chunk := next(self._chunks, None)) is not None:
            self._left -= len(chunk)
            if self._left < 0:
                raise DownloadError(f"the files have more than {self._max_bytes} bytes")
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def _is_inner_link(name: str, target: str) -> bool:
    """Return whether a symbolic link stays below the archive's first folder.

    Names in the archive are real paths. So is a target that goes up first and then only down, except for links on its way, which
    stay inside as well.
    """
    pieces = target.split("/")
    while pieces and pieces[0] in ("..", ".", ""):
        pieces.pop(0)
    if target.startswith("/") or ".." in pieces or "/" not in name:
        return False
    first = name.split("/")[0]
    resolved = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    return resolved == first or resolved.startswith(f"{first}/")


def _parents(name: str) -> list[str]:
    pieces = name.strip("/").split("/")
    return ["/".join(pieces[:end]) for end in range(1, len(pieces))]


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "a regular file"
    return file.read()


def _add_path(archive: tarfile.TarFile, path: Path, name: str, ids: tuple[int, int], mode: int | None) -> None:
    if path.is_dir():
        _add(archive, name, None, 0o755, ids)
        for child in sorted(path.iterdir()):
            _add_path(archive, child, f"{name}/{child.name}", ids, mode)
    elif path.is_symlink() and not path.exists():
        link = tarfile.TarInfo(name)
        link.type, link.linkname, (link.uid, link.gid) = tarfile.SYMTYPE, str(path.readlink()), ids
        archive.addfile(link)
    else:
        _add(archive, name, path.read_bytes(), path.stat().st_mode & 0o777 if mode is None else mode, ids)


def _add(archive: tarfile.TarFile, name: str, content: bytes | None, mode: int, ids: tuple[int, int]) -> None:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime, (member.uid, member.gid) = mode, int(time.time()), ids
    if content is None:
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    else:
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
