"""CRC-32 of the files of a folder: damage that their formats do not show, such as zeroed weights, is noticed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.core.atomic_files import write_atomically
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading

CHECKSUMS = "checksums.json"
"""File in the folder: size and CRC-32 of each file by its path in the folder."""
_CHUNK = 1 << 24
_THREADS = 16
_BLOCK, _BLOCKS = 1 << 16, 1 << 10
"""Size and number of the blocks of `sampled_checksum`."""


def write_checksums(folder: Path, without: Iterable[str] = ()) -> None:
    """Write the checksums of all files of a folder, but those with the names ``without``, which may change."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in without]
    with ThreadPoolExecutor(_THREADS) as pool:
        checksums = dict(
            zip((str(path.relative_to(folder)) for path in files), pool.map(_checksum, files), strict=True)
        )
    with write_atomically(folder / CHECKSUMS) as partial:
        partial.write_text(json.dumps(checksums, indent=1) + "\n", encoding="utf-8")


def check_checksums(folder: Path, *parts: str) -> None:
    """Check the files of a folder against `CHECKSUMS`; without that file nothing is checked.

    Args:
        folder: with the files.
        parts: subfolders that are checked; without any, all files are.

    Raises:
        CheckpointError: a file is missing, or not as it was written.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    with reading(folder / CHECKSUMS, "list of checksums", CheckpointError):
        recorded = {
            str(name): list(map(int, checksum))
            for name, checksum in json.loads((folder / CHECKSUMS).read_bytes()).items()
        }
    files = {folder / name: checksum for name, checksum in recorded.items() if not parts or name.split("/")[0] in parts}
    for path, (size, _) in files.items():
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} is damaged: it has {path.stat().st_size} bytes of {size}")
    with ThreadPoolExecutor(_THREADS) as pool, reading(folder, "checkpoint", CheckpointError):
        for (path, checksum), current in zip(files.items(), pool.map(_checksum, files), strict=True):
            if checksum != current:
                raise CheckpointError(f"{path} is damaged: it is not as it was written (its CRC-32 is another)")


def sampled_checksum(path: Path) -> str:
    """Return size and CRC-32 of a file; above 64 MiB of its blocks of 64 KiB at even distances, which takes no longer."""
    size = path.stat().st_size
    step, checksum = max(size // _BLOCKS, _BLOCK), 0
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            checksum = zlib.crc32(file.read(_BLOCK), checksum)
    return f"{size} bytes, crc32 {checksum:08x}"


def _checksum(path: Path) -> list[int]:
    """Return size and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]
