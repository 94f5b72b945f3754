"""Data files that a taskset's options name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.core.errors import MissingError

Files = str | Path | Sequence[str | Path]
"""One file or several."""


def file_paths(files: Files | None) -> list[Path]:
    """Return the paths of an option, with ``~`` expanded; none for None."""
    if files is None:
        return []
    return [Path(file).expanduser() for file in ([files] if isinstance(files, str | Path) else files)]


def check_files(options: Mapping[str, Sequence[Path]]) -> None:
    """Check that the files of ``tasks.options`` exist.

    Args:
        options: paths by option, such as ``train``.

    Raises:
        MissingError: names every missing file and its option.
    """
    missing_files = [
        f"tasks.options.{option}={path}: there is no such file"
        for option, paths in options.items()
        for path in paths
        if not path.is_file()
    ]
    if missing_files:
        raise MissingError("\n".join(missing_files))
