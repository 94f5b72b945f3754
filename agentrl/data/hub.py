"""Hugging Face datasets: from the hub, from its cache, or from a folder that ``datasets`` has written."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.extras import require
from agentrl.core.reading import flatten_message

PREFIX = "hf:"
"""Begins the name of a dataset of the hub."""


class Dataset(Protocol):
    """What is used of ``datasets.Dataset``, whose rows are in memory-mapped files."""

    column_names: list[str]

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row."""

    def select_columns(self, column_names: list[str]) -> Dataset:
        """Return the dataset with these columns only."""


class UndecodedRows:
    """The rows of a ``datasets.Dataset`` with images as it stores them, ``{"bytes", "path"}``: decoding them would take time.

    Args:
        dataset: has columns with images.
    """

    def __init__(self, dataset: Any) -> None:
        self.column_names: list[str] = dataset.column_names
        self._dataset = dataset
        self._tables = dataset.with_format("arrow")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._tables)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return a row."""
        values: Mapping[str, Any] = self._tables[index].to_pylist()[0]
        return values

    def select_columns(self, column_names: list[str]) -> Dataset:
        """Return the dataset with these columns only."""
        return UndecodedRows(self._dataset.select_columns(column_names))


def is_dataset(path: Path) -> bool:
    """Return whether a path of data is a dataset, and no file of rows."""
    return str(path).startswith(PREFIX) or path.suffix == ".arrow" or path.is_dir()


class DatasetStream(Protocol):
    """What is used of ``datasets.IterableDataset``, whose rows are read one after the other."""

    column_names: list[str] | None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Read the rows, from the loaded state or from the first one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last row that was read, JSON-able."""

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Begin the next iteration at a state; None: at the first row."""

    def select_columns(self, column_names: list[str]) -> DatasetStream:
        """Return the dataset with these columns only."""


def open_dataset(path: Path, key: str, columns: Collection[str] | None = None) -> tuple[Dataset, tuple[str, ...]]:
    """Return a dataset, and the names of its columns that were left out.

    Args:
        path: ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``; by default the split is ``train``. Or a folder
            written by ``save_to_disk``, or an ``.arrow`` file.
        key: the configuration key that names it, for messages.
        columns: keep only those of these names that it has.

    Raises:
        ConfigError: there is no such dataset.
        MissingError: the extra for it is not installed, or the dataset cannot be downloaded.
    """
    with _opening(path, key):
        import datasets

        if str(path).startswith(PREFIX):
            name, config, split = _parts(path, key)
            dataset: Any = datasets.load_dataset(name, config, split=split)
        elif path.suffix == ".arrow":
            dataset = datasets.Dataset.from_file(str(path))
        else:
            dataset = _from_folder(path, key)
    names, unread = split_columns(dataset.column_names, columns)
    selected, unread_names = (dataset.select_columns(names), unread) if names else (dataset, ())
    return UndecodedRows(selected) if _has_images(selected.features) else selected, unread_names


def open_stream(path: Path, key: str, columns: Collection[str] | None) -> tuple[DatasetStream, tuple[str, ...]]:
    """Return a dataset of the hub that is read as it is downloaded, and the names of its columns that were left out.

    Args:
        path: ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIG:SPLIT``.
        key: the configuration key that names it, for messages.
        columns: keep only those of these names that it has; None: all.

    Raises:
        ConfigError: there is no such dataset.
        MissingError: the extra for it is not installed, or the hub cannot be reached.
    """
    with _opening(path, key):
        import datasets

        name, config, split = _parts(path, key)
        stream: Any = datasets.load_dataset(name, config, split=split, streaming=True)
        names, unread = split_columns(stream.column_names or [], columns)
        selected, unread_names = (stream.select_columns(names), unread) if names else (stream, ())
        return selected.decode(False) if _has_images(selected.features) else selected, unread_names


def _has_images(feature: object) -> bool:
    """Return whether a feature of ``datasets``, or features by column, have images."""
    import datasets

    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
    return isinstance(feature, datasets.Image) or (inner is not None and _has_images(inner))


def split_columns(names: Sequence[str], columns: Collection[str] | None) -> tuple[list[str], tuple[str, ...]]:
    """Return the names that are in ``columns``, or all for None, and the others."""
    read = [name for name in names if columns is None or name in columns]
    return read, tuple(name for name in names if name not in read)


@contextmanager
def _opening(path: Path, key: str) -> Iterator[None]:
    """Turn what ``datasets`` raises in the body into errors that name the key."""
    require("datasets", f"{key}={path}")
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    try:
        yield
    except ConnectionError as error:
        raise MissingError(
            f"{key}={path}: {flatten_message(error)}; load it once on a machine with a network"
        ) from error
    except (OSError, ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ConfigError(f"{key}={path}: {type(error).__name__}: {flatten_message(error)}") from error


def _parts(path: Path, key: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split of a dataset of the hub."""
    match str(path).removeprefix(PREFIX).split(":"):
        case [str(name)] if name:
            return name, None, "train"
        case [str(name), str(split)] if name and split:
            return name, None, split
        case [str(name), str(config), str(split)] if name and config and split:
            return name, config, split
        case _:
            raise ConfigError(f"{key}={path}: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")


def _from_folder(path: Path, key: str) -> Any:
    import datasets

    splits = path / "dataset_dict.json"
    if splits.is_file():
        named = ", ".join(str(path / name) for name in json.loads(splits.read_text(encoding="utf-8"))["splits"])
        raise ConfigError(f"{key}={path}: the folder has several splits; name one: {named}")
    if not (path / "state.json").is_file():
        raise ConfigError(f"{key}={path}: it is a folder without a dataset that save_to_disk of datasets has written")
    return datasets.load_from_disk(str(path))
