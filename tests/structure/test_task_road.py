"""From a row of JSONL to the episodes of its task: the functions that hand it on, traced, are those of the page."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from agentrl.config.load import load_config
from agentrl.core.task import Task
from agentrl.data.conversion import ConvertedRow
from agentrl.data.jobs import Job, TaskJobs
from agentrl.data.rows import Row
from agentrl.data.task_sources import make_order, open_tasks, read_splits
from tests.structure.layers import REPOSITORY
from tests.structure.test_architecture import walk

PACKAGE = str(REPOSITORY / "agentrl")
CONTRACTS = str(REPOSITORY / "agentrl" / "core")
"""Base classes, and what builds objects by name."""
QUESTION = "which row is traced?"
MOST_FILES = 7
MODES = {
    "read at the start": ("data.path={path}",),
    "streaming": ("data.path={path}", "data.streaming=true"),
    "mixed": ("sources.rows.data.path={path}",),
    "mixed, streaming": ("sources.rows.data.path={path}", "sources.rows.data.streaming=true"),
}


def carries(value: Any) -> bool:
    """Return whether a value is the row, its task or its episodes, or a collection with them."""
    if isinstance(value, bytes):
        return QUESTION.encode() in value
    if isinstance(value, list | tuple):
        return any(map(carries, value))
    if isinstance(value, Mapping):
        return any(map(carries, value.values()))
    return isinstance(value, Row | ConvertedRow | Task | Job)


@contextmanager
def traced() -> Iterator[dict[tuple[str, str], None]]:
    """Collect the functions of agentrl that get or return the row, by qualified name and file, in order."""
    functions: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, value: Any) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(PACKAGE) or path.startswith(CONTRACTS):
            return
        handed = [local for name, local in frame.f_locals.items() if name != "self"] if event == "call" else value
        if "<" not in frame.f_code.co_qualname and carries(handed):
            functions[frame.f_code.co_qualname, str(Path(path).relative_to(REPOSITORY))] = None

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield functions
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def roads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """The traced functions, by how the rows are read."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(f'{{"prompt": "{QUESTION}"}}\n')
    roads = {}
    for mode, overrides in MODES.items():
        config = load_config(None, [override.format(path=path) for override in overrides])
        with traced() as functions:
            jobs = TaskJobs(config, make_order(config, read_splits(config, open_tasks(config))))
            try:
                episodes = jobs.group(0)
            finally:
                jobs.close()
        assert {job.task.question for job in episodes} == {QUESTION}
        roads[mode] = list(functions)
    return roads


@pytest.mark.parametrize("mode", MODES)
def test_few_files_hand_a_task_on(roads: dict[str, list[tuple[str, str]]], mode: str) -> None:
    files = {file for _, file in roads[mode]}
    assert len(files) <= MOST_FILES, files
    assert {Path(file).parent.name for file in files} <= {"data"}


def test_the_page_has_every_function_that_hands_a_task_on(roads: dict[str, list[tuple[str, str]]]) -> None:
    functions = {function: None for road in roads.values() for function in road}
    assert {row[1:] for row in walk("A task")} == set(functions), "\n".join(map(str, functions))
