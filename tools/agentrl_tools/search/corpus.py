r"""Corpora on disk: JSONL files of ``{"id", "contents"}``, contents being ``"title"\ntext``; gzipped ones too."""

from __future__ import annotations

import gzip
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, overload

import orjson

from agentrl import ConfigError
from agentrl.core.atomic_files import write_atomically

Document = Mapping[str, str]
"""``{"id", "contents"}``."""

DEFAULT = "default"
"""Name of a corpus that was given without one."""


def read_corpus(path: Path, key: str) -> Iterator[Document]:
    """Iterate over the documents of a file; ``key`` is the option that named it, for messages.

    Raises:
        ConfigError: there is no such file, or a line is not a document; with file, line and field.
    """
    with _open(path, key) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _document(line, f"{key}: {path}, line {number}")
        except (gzip.BadGzipFile, EOFError) as error:
            raise ConfigError(f"{key}: {path} cannot be unpacked: {error}") from None


def open_corpus(path: Path, key: str) -> Sequence[Document]:
    """Check every document of a file, and return them all.

    Those of a plain file stay on disk: a corpus of many gigabytes needs 16 bytes of memory a document. Those of a
    gzipped one are kept in memory.

    Raises:
        ConfigError: as in `read_corpus`, or the file holds no document.
    """
    documents = list(read_corpus(path, key)) if path.suffix == ".gz" else DocumentsOnDisk(path, key)
    if not len(documents):
        raise ConfigError(f"{key}: {path} holds no document")
    return documents


class DocumentsOnDisk(Sequence[Document]):
    """The documents of a plain JSONL file, each read at its access. The file must not change meanwhile."""

    def __init__(self, path: Path, key: str) -> None:
        """Read through the file once, checking every line.

        Raises:
            ConfigError: as in `read_corpus`.
        """
        self._path, self._key = path, key
        self._starts, self._lengths = array("q"), array("q")
        self._file = _open(path, key)
        start = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                _document(line, f"{key}: {path}, line {number}")
                self._starts.append(start)
                self._lengths.append(len(line))
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | Sequence[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        line = os.pread(self._file.fileno(), self._lengths[index], self._starts[index])
        return _document(line, f"{self._key}: {self._path}, document {index}")


def _open(path: Path, key: str) -> IO[bytes]:
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _document(line: bytes, where: str) -> Document:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object with 'id' and 'contents', found {type(row).__name__}")
    for field in ("id", "contents"):
        if field not in row:
            raise ConfigError(f"{where} has no {field!r}; it has: {', '.join(map(repr, row)) or 'nothing'}")
    if not isinstance(row["contents"], str):
        raise ConfigError(f"{where}: 'contents' must be a string, it is {row['contents']!r}")
    # Corpora in the field number their documents with integers as well as strings.
    return {"id": str(row["id"]), "contents": row["contents"]}


def write_corpus(documents: Iterable[Document], path: Path) -> None:
    """Write documents as JSONL, atomically; the file's folder is made.

    Raises:
        OSError: such as of a full disk; it names the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial, partial.open("wb") as lines:
        for document in documents:
            lines.write(orjson.dumps({"id": document["id"], "contents": document["contents"]}) + b"\n")


def named_files(texts: Sequence[str], option: str) -> dict[str, Path]:
    """Return files by name from ``NAME=FILE`` options; a ``FILE`` alone has the name ``default``.

    Raises:
        ConfigError: two of one name.
    """
    files = [_named_file(text) for text in texts]
    names = [name for name, _ in files]
    if len(set(names)) < len(names):
        raise ConfigError(f"{option}: each needs a unique name (NAME=FILE); given: {', '.join(names)}")
    return dict(files)


def _named_file(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and "/" not in name else (DEFAULT, Path(text))
