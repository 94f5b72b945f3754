"""Streams of tasks: their order, where a resumed run goes on, worker processes, and what is said of faults."""

import json
import multiprocessing
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from preloaded import Forked, Request
from pyarrow import parquet

from agentrl.config.load import load_config
from agentrl.config.tasks import DataConfig, DataSourceConfig
from agentrl.core.data_source import DataSource
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.task import Task
from agentrl.data.file_tasks import FileTasks, StreamOrder
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import make_data_source, make_order, open_tasks, read_splits

ROWS = [{"prompt": f"{n} + 1?", "label": n + 1, "name": f"r{n}"} for n in range(90)]
KEYS: dict[str, Any] = {"label_key": "label", "id_key": "name"}
FUNCTIONS = """
import os, signal

def odd(row):
    return None if row["label"] % 2 == 0 else {**row, "prompt": row["prompt"].upper()}

def nothing(row):
    return None

def fails(row):
    return row if row["label"] != 5 else 1 / 0

def dies(row):
    if row["label"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return row
"""
NAMES = ["rows.jsonl", "rows.parquet", "saved", "hub"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in each format; the dataset of the hub is three parquet files."""
    import datasets

    folder = tmp_path_factory.mktemp("streams")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=40)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    (folder / "hub").mkdir()
    for number in range(3):
        table = pa.Table.from_pylist(ROWS[30 * number :][:30])
        parquet.write_table(table, folder / "hub" / f"train-{number:05d}-of-00003.parquet", row_group_size=8)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


def data_of(folder: Path, name: str, function: str | None = None, **options: Any) -> DataConfig:
    path = Path(f"hf:{folder / 'hub'}") if name == "hub" else folder / name
    convert = None if function is None else f"{folder / 'functions.py'}:{function}"
    options = {"shuffle_buffer": 25, **KEYS, **options}
    return DataConfig(path=path, streaming=True, convert=convert, **options)


def source_of(data: DataConfig, seed: int = 0) -> DataSource:
    stream = FileTasks(data).stream
    assert stream is not None
    return make_data_source(DataSourceConfig(), stream, seed)


def names(tasks: list[Task] | Any) -> list[str]:
    return [task.id for task in tasks]


@pytest.mark.parametrize("name", NAMES)
def test_each_row_comes_once_an_epoch_in_an_order_of_the_seed(folder: Path, name: str) -> None:
    source = source_of(data_of(folder, name))
    first, second = names(source.get_samples(90)), names(source.get_samples(90))
    assert sorted(first) == sorted(second) == sorted(row["name"] for row in ROWS)
    assert first != second
    assert first != names(source_of(data_of(folder, name), seed=1).get_samples(90))


def test_files_are_trained_on_in_the_order_of_tasks_that_were_read_at_the_start(folder: Path) -> None:
    full_task_order = TaskOrder(FileTasks(DataConfig(path=folder / "rows.jsonl", **KEYS)).split("train"), 3)
    assert source_of(data_of(folder, "rows.jsonl"), 3).get_samples(200) == full_task_order.get_samples(200)


def test_rows_of_a_hub_are_shuffled_within_blocks(folder: Path) -> None:
    tasks = names(source_of(data_of(folder, "hub")).get_samples(90))
    for start in range(0, 90, 25):
        assert {*tasks[start : start + 25]} == {row["name"] for row in ROWS[start : start + 25]}
    limited = names(source_of(data_of(folder, "hub", limit=40)).get_samples(80))
    assert {*limited[:40]} == {*limited[40:]} == {row["name"] for row in ROWS[:40]}


@pytest.mark.parametrize("name", ["rows.jsonl", "hub"])
def test_a_resumed_run_takes_the_tasks_that_follow(folder: Path, name: str) -> None:
    make = partial(source_of, data_of(folder, name, "odd"))
    full_tasks = make().get_samples(150)
    assert all(task.answer % 2 and task.prompt[0].content.endswith("+ 1?") for task in full_tasks)
    for taken in (0, 1, 12, 13, 37, 44, 45, 46, 90, 101):
        state_before = make()
        state_before.get_samples(taken)
        resumed = make()
        resumed.load_state(json.loads(json.dumps(state_before.state())))
        assert resumed.get_samples(30) == full_tasks[taken : taken + 30]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "saved"])
def test_worker_processes_do_not_change_the_order(folder: Path, name: str) -> None:
    full_tasks = source_of(data_of(folder, name, "odd")).get_samples(120)
    source = source_of(data_of(folder, name, "odd", workers=2))
    try:
        assert source.get_samples(50) == full_tasks[:50]
        assert source.metrics()["data/left_out"] > 40
        state = json.loads(json.dumps(source.state()))
    finally:
        source.close()
    resumed = source_of(data_of(folder, name, "odd", workers=1))
    resumed.load_state(state)
    try:
        assert resumed.get_samples(70) == full_tasks[50:]
    finally:
        resumed.close()


def test_worker_processes_read_the_tasks_at_the_start(folder: Path) -> None:
    options = {"path": folder / "saved", "convert": f"{folder / 'functions.py'}:odd", "limit": 41, **KEYS}
    tasks = FileTasks(DataConfig(workers=1, **options)).split("train")
    assert tasks == FileTasks(DataConfig(**options)).split("train")
    assert names(tasks) == [f"r{n}" for n in range(0, 41, 2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_function_raises_is_said_when_its_row_is_taken(folder: Path, workers: int) -> None:
    order = names(source_of(data_of(folder, "rows.jsonl")).get_samples(90))
    source = source_of(data_of(folder, "rows.jsonl", "fails", workers=workers))
    try:
        assert names(source.get_samples(order.index("r4"))) == order[: order.index("r4")]
        with pytest.raises(ConfigError, match=r"rows\.jsonl, line 5: data\.convert=.*:fails raised ZeroDivisionError"):
            source.get_samples(1)
    finally:
        source.close()


def test_a_worker_process_that_dies_ends_the_run_with_its_row(folder: Path) -> None:
    source = source_of(data_of(folder, "rows.jsonl", "dies", workers=2))
    try:
        with pytest.raises(DataError, match=r"\(data\.workers=2\) was killed or crashed at .*rows\.jsonl, line 5\. "):
            source.get_samples(90)
    finally:
        source.close()


RUN = """
import signal, sys, time
from pathlib import Path
from agentrl.config.tasks import DataConfig
from agentrl.data.file_tasks import FileTasks, StreamOrder

def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    order = StreamOrder(FileTasks(DataConfig(path=Path(sys.argv[1]), streaming=True, workers=1)).stream, 0)
    order.get_samples(1)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_worker_process_outlives_a_run_that_is_killed_or_interrupted(folder: Path) -> None:
    (folder / "run.py").write_text(RUN)
    for end in (signal.SIGKILL, signal.SIGINT):
        reading, writing = os.pipe()
        files = {1: writing, 2: writing}
        request = Request("run:main", [str(folder / "rows.jsonl")], str(folder), dict(os.environ), files)
        run = Forked(request)
        os.close(writing)
        try:
            with open(reading) as output:
                assert output.readline() == "ready\n"
                started = psutil.Process(run.pid).children(recursive=True)
                assert len(started) >= 2, "a worker and what starts it"
                run.send_signal(end)
                output.read()
            run.wait(60)
            assert psutil.wait_procs(started, timeout=20)[1] == []
        finally:
            run.end()


def test_a_closed_source_leaves_no_process(folder: Path) -> None:
    source = source_of(data_of(folder, "rows.parquet", workers=2))
    other_active_children = multiprocessing.active_children()
    source.get_samples(1)
    workers = [process.pid for process in multiprocessing.active_children() if process not in other_active_children]
    assert len(workers) == 2
    source.close()
    assert psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=20)[1] == []


def test_rows_with_long_prompts_are_left_out(folder: Path) -> None:
    def orders(most: int) -> DataSource:
        changes = ["model.path=multihop-warm", f"data.path={folder / 'long.jsonl'}", f"data.max_prompt_tokens={most}"]
        config = load_config(None, [*changes, "data.streaming=true"])
        return make_order(config, read_splits(config, open_tasks(config)))

    (folder / "long.jsonl").write_text("".join(json.dumps({"prompt": "Who ? " * n}) + "\n" for n in (1, 200, 2, 300)))
    source = orders(100)
    assert sorted(names(source.get_samples(2))) == ["long.jsonl:1", "long.jsonl:3"]
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_tokens=2: all rows of data\.path=.*long\.jsonl are left out"
    ):
        orders(2).get_samples(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "hub"},
            r"needs tasks by number, but with data\.streaming=true data\.path=hf:.* is read in its order",
        ),
        (
            {"name": "rows.jsonl", "function": "odd"},
            r"rows are left out by data\.convert=.*odd; set data\.streaming=false",
        ),
    ],
)
def test_other_data_sources_need_tasks_by_number(folder: Path, options: Mapping[str, Any], message: str) -> None:
    stream = FileTasks(data_of(folder, **options)).stream
    assert stream is not None
    with pytest.raises(ConfigError, match=message):
        make_data_source(DataSourceConfig(name="curriculum"), stream, 0)


def test_faults_of_a_stream(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.convert=.*nothing: all rows of data\.path=.* are left out"):
        source_of(data_of(folder, "hub", "nothing")).get_samples(1)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line \d+: data\.convert=json:dumps must return a row"):
        source_of(DataConfig(path=folder / "rows.jsonl", streaming=True, convert="json:dumps")).get_samples(1)
    (folder / "twice.jsonl").write_text('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}\n')
    with pytest.raises(ConfigError, match=r"data\.id_key: .*line \d and .*line \d have the id 'x'; it must name rows"):
        source_of(DataConfig(path=folder / "twice.jsonl", streaming=True, id_key="name")).get_samples(2)


def test_a_hub_that_fails_in_mid_epoch_is_said_with_the_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Any:
        yield from ROWS[:30]
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    source = source_of(DataConfig(path=Path("hf:a/b"), streaming=True, shuffle_buffer=8))
    assert isinstance(source, StreamOrder)
    with pytest.raises(
        DataError, match=r"hf:a/b, row 31 \(data\.path\) cannot be read: ConnectionError: Couldn't reach"
    ):
        source.get_samples(40)


def test_a_stream_of_a_mixed_run_has_the_name_of_its_source(folder: Path) -> None:
    hub, jsonl = f"hf:{folder / 'hub'}", folder / "rows.jsonl"
    config = load_config(
        None,
        [
            f"sources.a.data={{path: '{hub}', streaming: true, id_key: name}}",
            f"sources.b.data={{path: '{jsonl}', streaming: true, id_key: name}}",
        ],
    )
    source = make_order(config, read_splits(config, open_tasks(config)))
    tasks = source.get_samples(20)
    assert {name.partition("/")[0] for name in names(tasks)} == {"a", "b"}
    resumed = make_order(config, read_splits(config, open_tasks(config)))
    resumed.load_state(json.loads(json.dumps(source.state())))
    assert resumed.get_samples(9) == source.get_samples(9)
    source.close()
