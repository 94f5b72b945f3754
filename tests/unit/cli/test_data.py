"""``agentrl data show``: what rows become, by the keys of training; bad rows, lengths and masks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main


def show(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["data", "show", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


ROWS = [{"prompt": f"What is {number} + 1?", "label": number + 1, "meta": {"hops": number}} for number in range(5)]
KEYS = ("data.label_key=label", "data.metadata_key=meta")


def test_tasks_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS[:3], {"prompt": "And?", "label": 1, "meta": None})
    status, out, _ = show(capsys, path, *KEYS, "--rows", 2)
    assert status == 0
    assert out.split("\n\n")[:2] == [
        f"{path}, line {line}: task rows.jsonl:{line}\nlabel     {line}\n"
        f'metadata  {{"hops": {line - 1}}}\nuser: What is {line - 1} + 1?'
        for line in (1, 2)
    ]
    assert out.split("\n\n")[2].splitlines()[0] == "tasks        4"
    assert "tokens       not counted; set model.path" in out


def test_prompts_are_those_of_the_model_and_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", *ROWS)
    (tmp_path / "my_tools.py").write_text(
        'def add(a: int, b: int = 1) -> int:\n    """Add numbers."""\n    return a + b\n'
    )
    settings = (
        "--env",
        "tools",
        f"env.tools=[{tmp_path}/my_tools.py:add]",
        "env.options.system=Be brief.",
        "reward=numeric",
    )
    rendered = ("model.path=python-math-warm", "data.max_prompt_tokens=1000")
    status, out, _ = show(capsys, path, *KEYS, *settings, *rendered, "--rows", 1)
    assert status == 0
    text = re.search(r"metadata  .*?\n(.*?)\n\n\w", out, re.DOTALL)
    assert text is not None
    assert "Be brief." in text[1]
    assert "What is 0 + 1?" in text[1]
    assert "add(a" in text[1]
    size = int(re.search(r"rows\.jsonl:1, (\d+) tokens", out)[1])  # type: ignore[index]
    assert f"tokens       {size} to {size} a row, median {size}; the longest: {path}, line 1" in out
    assert "tools        add" in out
    assert "tasks        5" in out
    status, out, err = show(capsys, path, *KEYS, *settings, rendered[0], "data.max_prompt_tokens=3")
    assert (status, "left out     5 rows" in out, "all rows are left out" in err) == (2, True, True)


def test_bad_rows_are_named_and_good_ones_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[0], "{", {"label": 3}, *[{"prompt": ""}] * 30, ROWS[1])
    status, out, err = show(capsys, path, "data.limit=33")
    assert status == 2
    assert f"bad row: {path}, line 2 (data.path) is no JSON" in out
    assert f"bad row: {path}, line 3: 'prompt' (data.input_key=prompt) is missing" in out
    assert len(re.findall("^bad row: ", out, re.MULTILINE)) == 21
    assert "bad row: … and 12 more" in out
    assert "tasks        1, 1 of them without a label" in out
    assert f"32 of 33 rows of data.path={path} cannot be used" in err
    empty = write(tmp_path / "empty.jsonl", {"prompt": "a", "label": ""})
    assert "tasks        1, 1 of them without a label" in show(capsys, empty, "data.label_key=label")[1]
    twice = write(tmp_path / "twice.jsonl", {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    status, out, _ = show(capsys, twice, "data.id_key=id")
    assert (status, f"line 2: 'id' (data.id_key) is 'x', as in {twice}, line 1" in out) == (2, True)


def test_chats_show_the_trained_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoken = (("user", "Who?"), ("assistant", "Me."), ("user", "And?"), ("assistant", "You."))
    turns = [{"role": role, "content": text} for role, text in spoken]
    path = write(tmp_path / "chats.jsonl", {"messages": turns}, {"messages": turns[:1]})
    status, out, err = show(capsys, path, "--sft", "model.path=multihop-warm")
    assert status == 2
    shown = out.partition("\n\nbad row")[0]
    stretches = re.findall(r"--- (\w+): (\d+) tokens\n(.*?)(?=\n---|\Z)", shown, re.DOTALL)
    assert [kind for kind, _, _ in stretches] == ["observed", "trained", "observed", "trained"]
    assert [text for kind, _, text in stretches if kind == "trained"] == ["Me.<|im_end|>", "You.<|im_end|>"]
    count = sum(int(size) for kind, size, _ in stretches if kind == "trained")
    assert f"trained      {count} of {sum(int(size) for _, size, _ in stretches)} tokens" in out
    assert f"bad row: {path}, line 2 has no message of the role assistant to train on" in out
    status, out, err = show(capsys, path)
    assert (status, "agentrl data show --sft reads rows as chats" in err) == (2, True)
    status, out, _ = show(capsys, path, "--sft", "data.limit=1")
    assert (status, "a chat of 4 messages\nuser: Who?\nassistant: Me.\n" in out) == (0, True)


def test_images_are_shown_by_type_and_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gif").write_bytes(b"GIF89a" + bytes(1200))
    path = write(tmp_path / "rows.jsonl", {"prompt": "Is <image> red?", "pictures": "a.gif"})
    status, out, _ = show(capsys, path, "data.image_key=pictures")
    assert status == 0
    assert "user: Is [image/gif, 1,206 bytes] red?" in out
