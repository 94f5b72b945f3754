"""Hugging Face datasets, and rows that are read from disk when their tasks are taken."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from agentrl.config.load import validate
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError, MissingError
from agentrl.data import rows
from agentrl.data.file_tasks import FileTasks, read_tasks
from agentrl.data.order import TaskOrder
from agentrl.data.rows import JsonlTable, open_table, read_rows
from agentrl.data.task_sources import open_tasks, read_split, read_splits, split_contents

ROWS = [
    {"prompt": f"{n} + 1?", "label": str(n + 1), "facts": {"n": n}, "name": f"r{n}", "more": "x" * n}
    for n in range(1100)
]
KEYS: dict[str, Any] = {"label_key": "label", "metadata_key": "facts", "id_key": "name"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in each format."""
    import datasets

    folder = tmp_path_factory.mktemp("rows")
    lines = "".join(json.dumps(row) + "\n" + "\n" * (row["facts"]["n"] % 7 == 0) for row in ROWS)  # type: ignore[index]
    (folder / "rows.jsonl").write_text(lines.removesuffix("\n"))
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=700)
    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(folder / "saved")
    (folder / "hub").mkdir()
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "hub" / "train.parquet")
    parquet.write_table(pa.Table.from_pylist(ROWS[:3]), folder / "hub" / "test.parquet")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(folder / "splits")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of the hub are converted in a folder of the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def path_of(folder: Path, name: str) -> Path:
    return Path(f"hf:{folder / 'hub'}") if name == "hub" else folder / name


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved", "saved/data-00000-of-00001.arrow"])
def test_streamed_tasks_are_those_of_the_whole_file(folder: Path, name: str) -> None:
    path = path_of(folder, name)
    streamed = FileTasks(DataConfig(path=path, streaming=True, **KEYS)).split("train")
    assert [*streamed] == read_tasks(path, DataConfig(**KEYS)) == read_tasks(folder / "rows.jsonl", DataConfig(**KEYS))
    assert streamed[-1].metadata == {"n": 1099}
    assert len(FileTasks(DataConfig(path=path, streaming=True, limit=5)).split("train")) == 5
    unnamed = FileTasks(DataConfig(path=path, streaming=True)).split("train")[8]
    assert unnamed == read_tasks(path, DataConfig(limit=9))[8]
    assert unnamed.id == f"{path.name}:{9 if name != 'rows.jsonl' else 11}", "its line or row"


def test_streamed_tasks_are_trained_on_in_the_order_of_a_whole_file(folder: Path) -> None:
    orders = [
        TaskOrder(
            read_split(FileTasks(DataConfig(path=folder / "rows.jsonl", streaming=streaming, **KEYS)), "train", "k"), 3
        )
        for streaming in (True, False)
    ]
    assert orders[0].get_samples(1300) == orders[1].get_samples(1300)


def test_a_split_and_a_limit_of_a_dataset_of_the_hub(folder: Path) -> None:
    test = Path(f"hf:{folder / 'hub'}:test")
    assert [task.id for task in read_tasks(test, DataConfig(**KEYS))] == ["r0", "r1", "r2"]
    assert [task.id for task in read_tasks(test, DataConfig())] == ["hub:test:1", "hub:test:2", "hub:test:3"]
    [row, *_] = read_rows(test, "data.path", {"prompt"})
    assert row.values == {"prompt": "0 + 1?"}
    assert (row.location, row.columns) == (f"{test}, row 1", ("prompt", "label", "facts", "name", "more"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:", r"data\.path=hf:: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"),
        ("hf:a:b:c:d", "write hf:NAME"),
        ("hf:FOLDER/absent", r"data\.path=hf:.*absent: FileNotFoundError: "),
        ("hf:FOLDER/hub:dev", r"ValueError: (Unknown|Bad) split.*dev.*\['train', 'test'\]"),
        ("hf:FOLDER/hub:french:train", "ValueError: .*french"),
        ("FOLDER/splits", r"the folder has several splits; name one: .*/splits/train, .*/splits/test$"),
        ("FOLDER/hub", "a folder without a dataset that save_to_disk of datasets has written"),
        ("FOLDER/absent.arrow", "FileNotFoundError"),
    ],
)
def test_a_dataset_that_is_not_there(folder: Path, name: str, message: str) -> None:
    path = Path(name.replace("FOLDER", str(folder)))
    for data in (DataConfig(path=path), DataConfig(path=path, streaming=True)):
        with pytest.raises(ConfigError, match=message) as raised:
            FileTasks(data)
        assert "\n" not in str(raised.value)


def test_a_dataset_that_cannot_be_downloaded_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'a/b' on the Hub\n(LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(MissingError, match=r"^data\.path=hf:a/b: Couldn't reach 'a/b' on the Hub .*load it once on a"):
        FileTasks(DataConfig(path=Path("hf:a/b")))


@given(
    text=st.lists(st.sampled_from(["{}", "", '{"a": "é"}', "{}\r", "\r", "  "]), max_size=12),
    ends=st.booleans(),
    chunk=st.integers(1, 9),
)
def test_lines_are_found_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, text: list[str], ends: bool, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(("\n".join(text) + "\n" * ends).encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows, "_CHUNK", chunk)
        table = JsonlTable(path, "data.path")
        actual = [table[index] for index in range(len(table))]
    assert actual == [*read_rows(path, "data.path")]


def test_a_long_line_of_spaces_is_no_empty_line_in_both_ways_to_read(tmp_path: Path) -> None:
    """Numbers of chats are counted in one way, and their rows read in the other."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n' + " " * 30 + '\n{"prompt": "b"}\n')
    for read in (lambda: list(read_rows(path, "data.path")), lambda: open_table(path, "data.path", None)[1]):
        with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2 .* is no JSON"):
            read()


def test_a_text_of_parquet_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"prompt": texts}), path)
    with pytest.raises(
        ConfigError, match=r"rows\.parquet, row 2 is not a row of a parquet file, or .*UnicodeDecodeError"
    ):
        open_table(path, "data.path", None)[1]


def test_a_change_of_any_row_of_a_streamed_file_is_noticed(tmp_path: Path) -> None:
    """Also beyond the rows that are compared one by one, in a file of the same size."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f'{{"prompt": "{n:04d}", "label": "0"}}\n' for n in range(400)))
    config = validate({"env": {"name": "single_turn"}, "data": {"path": str(path), "streaming": True}})
    splits = read_splits(config, open_tasks(config))
    before = split_contents(config, splits)
    path.write_text(path.read_text().replace('"0301", "label": "0"', '"0301", "label": "1"'))
    assert split_contents(config, splits) != before


def test_faults_of_streamed_rows_are_said_when_they_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": ""}\nno\n')
    tasks = FileTasks(DataConfig(path=path, streaming=True)).split("train")
    assert tasks[0].id == "train.jsonl:1"
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 3: 'prompt' \(data\.input_key\) is an empty text"):
        tasks[1]
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 4 \(data\.path\) is no JSON: .*: no$"):
        tasks[2]
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="the file holds no rows"):
        open_table(path, "data.path", ())
    with pytest.raises(ConfigError, match=r"there is no such file \(looked for"):
        open_table(tmp_path / "absent.jsonl", "data.path", ())
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(ConfigError, match="is not a parquet file, or is damaged"):
        open_table(tmp_path / "bad.parquet", "data.path", ())
