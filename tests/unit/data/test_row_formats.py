"""The row formats of docs/how_to/data_formats.md, by the commands of the page: number of tasks, first prompt, label, reward."""

import asyncio
import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, UserError
from agentrl.core.registry import reward_function
from agentrl.core.tool_arguments import arguments_fault
from agentrl.core.types import Message, Rollout, StopReason, ToolCall
from agentrl.data.chats import Chat, ChatConversion
from agentrl.data.conversion import RowConversion
from agentrl.data.file_tasks import FileTasks, convert_all, read_tasks
from agentrl.render.registry import make_renderer
from agentrl.rewards.sample import Sample
from agentrl.sft.chats import chat_rows
from tests.unit.render.test_every_template import tokenizer

FOLDER = Path(__file__).parent / "rows"
PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "data_formats.md"


@dataclass(frozen=True)
class Tasks:
    """What a file of tasks becomes."""

    count: int
    first_id: str
    prompt: str
    label: Any
    right: str
    wrong: str


DAPO = "Solve the following math problem step by step. The last line of your response should be Answer: $Answer.\n\n"
TASKS = {
    "gsm8k.jsonl": Tasks(3, "gsm8k.jsonl:1", "Mara bakes 3 trays of 14 rolls and sells 5 rolls. How many rolls are left?",
                         "37", "So 37 are left.", "So 42 are left."),
    "verl.jsonl": Tasks(2, "verl.jsonl:1",
                        'What is 17 + 25? Give the last line as "Answer: number".', "42", "Answer: 42.0", "Answer: 43"),
    "dapo.jsonl": Tasks(2, "9a9b6eb4", DAPO + "Find the sum of the first 8 odd numbers.", "64",
                        "Answer: $64$", "Answer: 9"),
    "search_r1.jsonl": Tasks(1, "train_0", "Answer the question: which river runs through the capital of austria?",
                             ["Danube", "the Danube", "Donau"], "<answer>donau</answer>", "<answer>Rhine</answer>"),
    "hotpotqa.json": Tasks(2, "h1", "Were Ada Lovelace and Emmy Noether born in the same country?", "no", "No.", "yes"),
    "nq.jsonl": Tasks(2, "nq.jsonl:1", "when was the eiffel tower finished", ["1889", "31 March 1889"], "31 march 1889", "1888"),
    "nq.csv": Tasks(2, "nq.csv:1", "when was the eiffel tower finished", ["1889", "31 March 1889"], "1889", "31 March"),
    "squad.json": Tasks(2, "s1", "How long is the Nile?", ["6,650 km", "6650 km"], "6650 km", "a mile"),
}  # fmt: skip
CHATS = {"openai_chats.jsonl", "sharegpt.json"}


def recipes() -> dict[str, tuple[str, list[str]]]:
    """Command and settings of the page, by the file's name."""
    lines = re.findall(
        r"^agentrl (train|sft) (?:--env single_turn )?data\.path=(\S+) (.*)$", PAGE.read_text(), re.MULTILINE
    )
    return {file: (command, settings.split()) for command, file, settings in lines}


def recipe(file: str, path: Path | None = None) -> Config:
    _, settings = recipes()[file]
    return load_config(None, [f"data.path={path or FOLDER / file}", *settings])


def score(config: Config, label: Any, said: str) -> float:
    rollout = Rollout("p", "r", [], 0.0, StopReason.TERMINATED)
    sample = Sample("q", said, said, label, {}, "p", "r", (), StopReason.TERMINATED, rollout)
    assert config.reward.function is not None
    return float(reward_function(config.reward.function)(sample))


def test_the_page_and_the_files_are_the_same() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*TASKS, *CHATS} == {*recipes()}


@pytest.mark.parametrize("file", [*TASKS, *(f"{name} as parquet" for name in TASKS if name.endswith(".jsonl"))])
def test_a_file_of_tasks(file: str, tmp_path: Path) -> None:
    file, _, suffix = file.partition(" as ")
    expected, path = TASKS[file], FOLDER / file
    if suffix:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path = tmp_path / f"{path.stem}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path)
    config = recipe(file, path)
    tasks = read_tasks(path, config.data)
    assert len(tasks) == expected.count
    assert tasks[0].id == expected.first_id.replace(file, path.name)
    assert (tasks[0].prompt[-1].content, tasks[0].answer) == (expected.prompt, expected.label)
    assert score(config, tasks[0].answer, expected.right) == 1.0
    assert score(config, tasks[0].answer, expected.wrong) < 1.0
    streamed = FileTasks(config.data.model_copy(update={"streaming": True})).stream
    assert streamed is not None
    assert streamed.sample(99) == [*tasks]


def test_what_the_other_columns_become() -> None:
    verl = read_tasks(FOLDER / "verl.jsonl", recipe("verl.jsonl").data)
    assert verl[1].prompt == (Message("system", "Be brief."), Message("user", "What is 1/4 of 50?"))
    assert verl[1].metadata == {"split": "train", "index": 1}
    gsm8k = read_tasks(FOLDER / "gsm8k.jsonl", recipe("gsm8k.jsonl").data)
    assert [task.answer for task in gsm8k] == ["37", "1200", "4"]
    nq = read_tasks(FOLDER / "nq.csv", recipe("nq.csv").data)
    assert (nq[1].prompt[0].content, nq[1].answer) == ('who wrote the opera "fidelio", and when', ["Beethoven, 1805"])


def test_keys_into_cells_of_csv(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [["prompt", "reward_model", "meta"], ["[x]?", '{"truth": [1, 2]}', '{"hops": 2}'], ["{y", "{", ""]]
        )
    settings = {"label_key": "reward_model.truth", "metadata_key": "meta", "path": path, "limit": 1}
    config = load_config(None, [f"data.{key}={value}" for key, value in settings.items()])
    [task] = read_tasks(path, config.data)
    assert (task.prompt[0].content, task.answer, task.metadata) == ("[x]?", [1, 2], {"hops": 2})
    with pytest.raises(
        ConfigError, match=r"rows\.csv, row 2: 'reward_model\.truth' .* is missing; 'reward_model' has the keys: none"
    ):
        read_tasks(path, config.data.model_copy(update={"limit": None}))


@pytest.mark.parametrize(
    ("text", "rows_key", "message"),
    [
        ('{\n"data": []}', None, r"line 1 .* is no JSON.*data\.rows_key names the list of rows"),
        ('{"data": [{"prompt": "a"}]}', "rows", r"data\.rows_key=rows: .* has no 'rows'; there are: data"),
        ('{"data": {"train": 1}}', "data.test", r"has no 'test'; there are: train"),
        ('{"data": {"train": 1}}', "data", r"data\.rows_key=data: .* it is \{'train': 1\}, and no list of rows"),
        ('{"data": [1]}', "data", r"rows\.json, row 1 .* must be a JSON object, and is '1'"),
    ],
)
def test_objects_that_hold_no_rows(tmp_path: Path, text: str, rows_key: str | None, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_tasks(path, load_config(None, [f"data.rows_key={rows_key or 'null'}"]).data)


def chats(file: str, path: Path | None = None) -> list[Chat]:
    config = recipe(file, path)
    assert config.data.path is not None
    convert = ChatConversion(config.data, config.sft)
    return [chat for _, chat in convert_all(config.data.path, config.data, "data.path", convert, 0) if chat is not None]


def trained(chat: Chat) -> list[str]:
    """Return each run of trained tokens as text, in the format of Qwen2.5."""
    renderer = make_renderer(tokenizer("qwen2_5"))
    texts = []
    for row in asyncio.run(chat_rows(chat, renderer)).rows:
        runs = re.finditer("1+", "".join(map(str, row.mask.tolist())))
        texts += [renderer.decode(row.token_ids[run.start() : run.end()]) for run in runs]
    return texts


def multiply(number: str) -> tuple[ToolCall, ...]:
    return (ToolCall(number, "multiply", {"a": 6, "b": 7}),)


def test_sharegpt() -> None:
    plain, called, tagged = chats("sharegpt.json")
    assert plain.messages[0] == Message("system", "You answer in one sentence.")
    assert plain.messages[-1] == Message("assistant", "Jet is a kind of lignite.")
    assert called.messages[1:3] == (Message("assistant", "", multiply("")), Message("tool", "42"))
    assert tagged.messages[1:3] == (
        Message("assistant", "I calculate.", multiply("")),
        Message("tool", '{"result": 42}'),
    )
    assert [tool.name for chat in (plain, called, tagged) for tool in chat.tools] == ["multiply", "multiply"]
    assert trained(plain) == ["Amber is fossilised resin.<|im_end|>", "Jet is a kind of lignite.<|im_end|>"]
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call><|im_end|>'
    assert trained(tagged) == [f"I calculate.\n{call}", "It is 42.<|im_end|>"]
    assert trained(called)[0].endswith(call)


def test_turns_of_sharegpt_that_are_not_trained(tmp_path: Path) -> None:
    path, ask = tmp_path / "chats.json", {"from": "human", "value": "a", "weight": 0}
    for mark, message in (({"weight": 0}, ""), ({"train": False}, "message 2 has train")):
        turns = [ask, {"from": "gpt", "value": "b", **mark}, ask, {"from": "gpt", "value": "c", "weight": 1}]
        path.write_text(json.dumps([{"conversations": turns}]))
        if message:
            with pytest.raises(ConfigError, match=message):
                chats("sharegpt.json", path)
        else:
            assert chats("sharegpt.json", path)[0].untrained == {1}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chats_of_openai_with_schemas_that_refer_and_allow_null(suffix: str, tmp_path: Path) -> None:
    path = FOLDER / "openai_chats.jsonl"
    if suffix == ".parquet":  # schemas as JSON text
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path = tmp_path / "chats.parquet"
        parquet.write_table(
            pa.Table.from_pylist([{**row, "tools": json.dumps(row.get("tools"))} for row in rows]), path
        )
    trip, greeting = chats("openai_chats.jsonl", path)
    [tool] = trip.tools
    [call] = trip.messages[2].tool_calls
    assert tool.parameters["properties"]["when"] == {
        "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
        "default": None,
    }
    assert tool.parameters["properties"]["unit"]["enum"] == ["km", "mi", None]
    assert call.arguments == {"place": {"name": "Bergen", "near": None}, "when": None, "unit": "km"}
    assert arguments_fault(tool.parameters, call.arguments) == ""
    assert "near" in arguments_fault(tool.parameters, {"place": {"name": "Bergen", "near": 1}})
    renderer = make_renderer(tokenizer("qwen2_5"))
    [row] = asyncio.run(chat_rows(trip, renderer)).rows
    assert '"$ref": "#/$defs/Place"' in renderer.decode(row.token_ids)
    assert trained(trip)[-1] == "463 km.<|im_end|>"
    assert trained(greeting) == ["Hello. How can I help?<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "convert", "message"),
    [
        ({"question": "a", "answer": "42"}, "gsm8k", r"line 1: data\.convert=gsm8k raised ValueError.*no number behind ####"),
        ({"question": "a", "answer": "42 ####"}, "gsm8k", "no number behind"),
        ({"question": "a"}, "gsm9k", r"unknown conversion .gsm9k. \(data\.convert\)\. Did you mean .gsm8k."),
        ({"messages": []}, "sharegpt", "no list conversations; it has the keys: messages"),
        ({"conversations": [{"from": "bot", "value": "a"}]}, "sharegpt", "turn 1 is .* from one of human"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "sharegpt", "turn 1 has the call '{', which is no JSON"),
        ({"conversations": [{"from": "gpt", "value": "<tool_call>{}"}]}, "sharegpt", "a <tool_call> that does not end"),
        ({"conversations": [{"from": "function_call", "value": "[1]"}]}, "sharegpt", r"the call 1; it must be \{name"),
    ],
)  # fmt: skip
def test_rows_that_a_conversion_refuses(tmp_path: Path, row: Mapping[str, Any], convert: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    data = load_config(None, [f"data.path={path}", f"data.convert={convert}"]).data
    with pytest.raises(UserError, match=message):
        list(convert_all(path, data, "data.path", RowConversion(data), 0))


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"name": "f", "parameters": {"type": "dict"}}, "line 1: 'tools' .*f: its JSON Schema is invalid"),
        ({"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/A"}}}}, "an unresolvable reference"),
    ],
)
def test_a_schema_that_is_none_is_named_with_its_row(tmp_path: Path, tool: Mapping[str, Any], message: str) -> None:
    path = tmp_path / "chats.jsonl"
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": answered, "tools": [tool]}))
    with pytest.raises(ConfigError, match=message):
        chats("openai_chats.jsonl", path)


def test_a_weight_is_0_or_1(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    for weight, message in ((0.5, "message 2 has the weight 0.5"), (0, "to train on whose weight is not 0")):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]
        path.write_text(json.dumps({"messages": turns}))
        with pytest.raises(ConfigError, match=message):
            chats("openai_chats.jsonl", path)
