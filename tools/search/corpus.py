r"""Corpora on disk: JSONL files of ``{"id", "contents"}``, contents being ``"title"\ntext``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import orjson

from agentrl.errors import ConfigError

Document = Mapping[str, str]
"""``{"id", "contents"}``."""

DEFAULT = "default"
"""Name of a corpus that was given without one."""


def read_corpus(path: Path, key: str) -> Iterator[Document]:
    """Iterate over the documents of a file; ``key`` is what errors call the option that named it.

    Raises:
        ConfigError: there is no such file, or a line is not a document; with file, line and field.

    """
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _document(line, f"{key}: {path}, line {number}")


def _document(line: bytes, where: str) -> Document:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
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
    """Write documents as JSONL; the file's folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as lines:
        for document in documents:
            lines.write(orjson.dumps({"id": document["id"], "contents": document["contents"]}) + b"\n")


def parse_corpus_option(text: str) -> tuple[str, Path]:
    """Return name and path of ``name=FILE.jsonl``, or of ``FILE.jsonl``, which has the name ``default``."""
    name, separator, path = text.partition("=")
    return (name, Path(path)) if separator and "/" not in name else (DEFAULT, Path(text))
