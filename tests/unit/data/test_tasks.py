"""Tasks from JSONL and parquet files, and what is said of files that do not fit."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from agentrl import Message
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import ConfigError, UnknownNameError
from agentrl.core.types import ToolCall
from agentrl.data.file_tasks import FileTasks, read_tasks

ROWS = [
    {"prompt": "2 + 2?", "label": "4", "meta": {"hops": 1}, "name": "a"},
    {"prompt": "3 + 3?", "label": "6", "meta": {"hops": 2}, "name": "b"},
]
ALL: dict[str, Any] = {"label_key": "label", "metadata_key": "meta", "id_key": "name"}


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.name == "train.json":
        path.write_text("\ufeff" + json.dumps(rows))
    else:
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", "-lines.json", ".parquet"])
def test_rows_become_tasks(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"train{suffix}", ROWS)
    tasks = read_tasks(path, DataConfig(**ALL))
    assert [task.id for task in tasks] == ["a", "b"]
    assert [task.prompt for task in tasks] == [(Message("user", "2 + 2?"),), (Message("user", "3 + 3?"),)]
    assert [task.answer for task in tasks] == ["4", "6"]
    assert [task.metadata for task in tasks] == [{"hops": 1}, {"hops": 2}]
    assert tasks == read_tasks(path, DataConfig(**ALL))
    plain = read_tasks(path, DataConfig())
    assert [task.id for task in plain] == [f"train{suffix}:1", f"train{suffix}:2"]
    assert plain[0].answer is None
    assert plain[0].metadata == {}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_name_with_dots_is_the_way_into_a_mapping(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "2?", "reward_model": {"ground_truth": "4", "style": {"name": "rule"}}, "a.b": "x"}]
    path = write(tmp_path / f"train{suffix}", rows)
    for streaming in (False, True):
        for key, answer in {"reward_model.ground_truth": "4", "reward_model.style.name": "rule", "a.b": "x"}.items():
            tasks = FileTasks(DataConfig(path=path, label_key=key, streaming=streaming))
            stream = tasks.stream
            [task] = stream.sample(1) if stream is not None else tasks.split("train")
            assert task.answer == answer
    with pytest.raises(
        ConfigError, match=r"'reward_model\.truth' .* is missing; 'reward_model' has the keys: ground_truth"
    ):
        read_tasks(path, DataConfig(label_key="reward_model.truth"))
    with pytest.raises(ConfigError, match=r"'prompt\.x' .* is missing"):
        read_tasks(path, DataConfig(label_key="prompt.x"))


def test_a_csv_file_has_texts(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "rows.csv").write_text(f'\ufeffprompt,label\n"2, or\n""3""?",4\n{long},\n', encoding="utf-8")
    for streaming in (False, True):
        data = DataConfig(path=tmp_path / "rows.csv", label_key="label", streaming=streaming)
        stream = FileTasks(data).stream
        tasks = stream.sample(2) if stream is not None else read_tasks(tmp_path / "rows.csv", data)
        assert [task.prompt[0].content for task in tasks] == ['2, or\n"3"?', long]
        assert [task.answer for task in tasks] == ["4", ""]
    (tmp_path / "rows.csv").write_text("prompt,label\na,b,c\n")
    with pytest.raises(ConfigError, match=r"rows\.csv, row 1 .* has more values than there are columns"):
        read_tasks(tmp_path / "rows.csv", DataConfig())
    (tmp_path / "rows.csv").write_text('prompt,label\n"a,b\n')
    with pytest.raises(ConfigError, match=r"rows\.csv, line 1 .* is no CSV: unexpected end of data"):
        read_tasks(tmp_path / "rows.csv", DataConfig())
    (tmp_path / "rows.csv").write_text("prompt,label,prompt\na,b,c\n")
    with pytest.raises(ConfigError, match=r"rows\.csv .* has several columns 'prompt'"):
        read_tasks(tmp_path / "rows.csv", DataConfig())


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path, name: str) -> None:
    rows = '{"prompt": "\\uD83D\\uDE00"}', '{"prompt": "\\ud83d"}'
    as_file = "[{}]" if name == "rows.json" else "{}"
    (tmp_path / name).write_text(as_file.format(rows[0]))
    assert read_tasks(tmp_path / name, DataConfig())[0].prompt[0].content == "\U0001f600"
    (tmp_path / name).write_text(as_file.format(rows[1]))
    with pytest.raises(ConfigError, match="surrogates not allowed"):
        read_tasks(tmp_path / name, DataConfig())
    (tmp_path / "rows.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"rows\.json, row 1 .* must be a JSON object, and is '1'"):
        read_tasks(tmp_path / "rows.json", DataConfig())
    (tmp_path / "rows.json").write_text("[{]")
    with pytest.raises(ConfigError, match=r"rows\.json is not a \.json file, or is damaged"):
        read_tasks(tmp_path / "rows.json", DataConfig())


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chat_prompts(tmp_path: Path, suffix: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path = write(tmp_path / f"train{suffix}", [{"messages": chat}])
    [task] = read_tasks(path, DataConfig(input_key="messages"))
    assert task.prompt == (Message("system", "Be brief."), Message("user", "2 + 2?"))
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template=false a prompt is one text"):
        read_tasks(path, DataConfig(input_key="messages", apply_chat_template=False))


def test_prompts_with_tool_calls_and_prompts_that_are_json_text(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    rows = [{"prompt": chat}, {"prompt": json.dumps(chat)}, {"prompt": "[1, 2] or [3]?"}, {"prompt": '["a", "b"]'}]
    tasks = read_tasks(write(tmp_path / "train.jsonl", rows), DataConfig())
    expected = (
        Message("user", "1 + 1?"),
        Message("assistant", "", (ToolCall("c1", "add", {"a": 1}),)),
        Message("tool", "2", tool_call_id="c1"),
    )
    assert [task.prompt for task in tasks[:2]] == [expected, expected]
    assert [task.prompt[0].content for task in tasks[2:]] == ["[1, 2] or [3]?", '["a", "b"]']
    raw = read_tasks(write(tmp_path / "raw.jsonl", rows[1:2]), DataConfig(apply_chat_template=False))
    assert raw[0].prompt == (Message("user", rows[1]["prompt"], inline=True),)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]},
            "which only an assistant makes",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
            r"the tool call .* must be \{id, function",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "arguments as JSON",
        ),
    ],
)
def test_a_call_that_is_none_is_refused(tmp_path: Path, message: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_tasks(write(tmp_path / "train.jsonl", [{"prompt": [message]}]), DataConfig())


def test_a_prompt_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ROWS)
    assert read_tasks(path, DataConfig(apply_chat_template=False))[0].prompt == (
        Message("user", "2 + 2?", inline=True),
    )


def test_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ROWS)
    tasks = FileTasks(DataConfig(path=path, limit=1))
    assert len(tasks.split("train")) == 1
    assert len(tasks.split("eval")) == 0
    assert len(FileTasks(DataConfig(path=path, eval_path=path)).split("eval")) == 2
    with pytest.raises(UnknownNameError, match=r"'test' \(tasks\.train_split"):
        tasks.split("test")


def test_empty_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["", json.dumps(ROWS[0]), "  ", json.dumps(ROWS[1])])
    assert [task.id for task in read_tasks(path, DataConfig())] == ["train.jsonl:2", "train.jsonl:4"]


def test_an_empty_cell_of_metadata_is_no_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [ROWS[0], {**ROWS[1], "meta": None}])
    assert read_tasks(path, DataConfig(metadata_key="meta"))[1].metadata == {}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (["{'prompt': 1}"], {}, r"train\.jsonl, line 1 \(data\.path\) is no JSON: .*\{'prompt': 1\}"),
        ([ROWS[0], '{"prompt":'], {}, r"train\.jsonl, line 2 .* is no JSON"),
        (["[1, 2]"], {}, r"line 1 .* must be a JSON object, and is a list"),
        (
            [{"question": "x", "label": 1}],
            {},
            r"line 1: 'prompt' \(data\.input_key=prompt\) is missing; .*: question, label",
        ),
        ([ROWS[0], {"prompt": "x"}], {"label_key": "label"}, r"line 2: 'label' \(data\.label_key=label\) is missing"),
        ([{"prompt": "x", "label": None}], {"label_key": "label"}, r"'label' .* is null"),
        ([{"prompt": "x"}], {"metadata_key": "meta"}, r"'meta' \(data\.metadata_key=meta\) is missing"),
        ([{"prompt": "x", "meta": "y"}], {"metadata_key": "meta"}, r"must be a mapping, and is 'y'"),
        ([{"prompt": 3}], {}, r"'prompt' \(data\.input_key\) must be a text or a list of messages .* is 3"),
        ([{"prompt": " "}], {}, r"is an empty text"),
        ([{"prompt": []}], {}, r"must be a text or a list"),
        ([{"prompt": ["x"]}], {}, r"message 1 must be \{role, content\}, and is 'x'"),
        (
            [{"prompt": [{"role": "human", "content": "x"}]}],
            {},
            r"message 1 has the role 'human'; roles are system, user",
        ),
        ([{"prompt": [{"role": "user", "content": 4}]}], {}, r"message 1 has the content 4, which must be a text"),
        ([{"prompt": [{"role": "user", "content": "x", "image": "y"}]}], {}, r"message 1 has image"),
        ([ROWS[0], ROWS[0]], {"id_key": "name"}, r"line 2: 'name' is 'a', as in .*line 1; data\.id_key must name rows"),
        ([], {}, r"data\.path=.*train\.jsonl: the file holds no rows"),
        (['{"prompt": "x", "prompt": "y"}'], {}, r"line 1 .* is no JSON: an object has the key 'prompt' several times"),
        (
            ['{"prompt": "x", "label": NaN}'],
            {"label_key": "label"},
            r"line 1: 'label' .* cannot be written as JSON: .*\(nan\)",
        ),
        (['{"prompt": "x", "label": [1e400]}'], {"label_key": "label"}, r"'label' .* cannot be written as JSON: .*inf"),
    ],
    ids=range(20),
)
def test_rows_that_do_not_fit(tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        read_tasks(path, DataConfig(**options))


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_path=.*no such file"):
        FileTasks(DataConfig(eval_path=tmp_path / "none.jsonl"))
    text = tmp_path / "train.txt"
    text.write_text("prompt\nx\n")
    with pytest.raises(ConfigError, match=r"from \.jsonl, \.json, \.csv, \.parquet files, not from '\.txt'"):
        read_tasks(text, DataConfig())
    broken = tmp_path / "train.parquet"
    broken.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"eval\.path=.*is not a parquet file"):
        read_tasks(broken, DataConfig(), "eval.path")
    binary = tmp_path / "train.jsonl"
    binary.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 1 .* is no JSON"):
        read_tasks(binary, DataConfig())


def test_what_cannot_be_written_beside_a_rollout(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", [{"prompt": "x", "label": datetime.date(2026, 1, 1)}])
    with pytest.raises(ConfigError, match=r"row 1: 'label' \(data\.label_key\) cannot be written as JSON"):
        read_tasks(path, DataConfig(label_key="label"))
