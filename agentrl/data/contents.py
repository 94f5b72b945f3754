"""Checksums of the tasks of a run: data that changes between the start of a run and its resume is noticed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import orjson

from agentrl.config.recorded import CONTENT
from agentrl.config.schema import Config
from agentrl.core.task import MadeTasks, Task, task_to_dict
from agentrl.data.file_tasks import TaskStream
from agentrl.data.task_sources import Split, split_size

SAMPLED_TASKS = 64
"""Tasks that are read of a split whose tasks are made on access, at even distances."""


def split_contents(config: Config, splits: Mapping[str, Split]) -> dict[str, str]:
    """Return number and CRC-32 of the tasks to train on, by ``content of KEY`` with the key that chooses them.

    Of a split whose tasks are made on access (`MadeTasks`, ``data.streaming``) `SAMPLED_TASKS` are read, and of a file its size.
    """
    contents = {}
    for name, source_config in config.by_source().items():
        key = "tasks.train_split" if source_config.data.path is None else "data.path"
        prefix = f"sources.{name}." if name else ""
        contents[f"{CONTENT}{prefix}{key}"] = _describe(splits[name])
    return contents


def _describe(split: Split) -> str:
    checksum, size = 0, split_size(split)
    for task in _sample(split):
        checksum = zlib.crc32(orjson.dumps(task_to_dict(task), option=orjson.OPT_SORT_KEYS), checksum)
    count = "stream" if size is None else f"{size} tasks"
    in_file = f", {split.path.stat().st_size} bytes" if isinstance(split, TaskStream) and split.path.is_file() else ""
    return f"{count}{in_file}, crc32 {checksum:08x}"


def _sample(split: Split) -> Iterator[Task]:
    if isinstance(split, TaskStream):
        yield from split.sample(SAMPLED_TASKS)
    elif isinstance(split, MadeTasks):
        yield from (split[index] for index in range(0, len(split), max(1, len(split) // SAMPLED_TASKS)))
    else:
        yield from split
