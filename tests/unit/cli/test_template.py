"""``agentrl template check`` as a user types it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.registry import model_folder
from tests.unit.render.oracles import template

LINE = "chatml, hand-written; one row an episode; turns end with <|im_end|>, which is trained; tool calls: hermes"


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A chat template that leaves earlier reasoning out."""
    file = tmp_path / "qwen3.jinja"
    file.write_text(template("qwen3"), encoding="utf-8")
    return file


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(("template", "check", *words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_tokenizer_files_are_enough(tmp_path: Path) -> None:
    """A folder without weights and model settings, and a Python without torch."""
    shipped = model_folder("multihop-warm")
    assert shipped is not None
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (shipped / name).exists():
            shutil.copy(shipped / name, tmp_path)
    code = "import sys; sys.modules['torch'] = None; from agentrl.cli.main import main; sys.exit(main())"
    words = [sys.executable, "-c", code, "template", "check", "--tokenizer", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "chatml (hand-written" in done.stdout
    assert done.stdout.count("bridge") == 8


def test_a_shipped_model_by_its_name_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = check(capsys, "--tokenizer", "multihop-warm", "--json")
    record = json.loads(out)
    assert status == 0
    assert record["summary"] == LINE
    assert record["end"] == {
        "written": ["<|im_end|>"], "stops": ["<|im_end|>"], "ending": "trained", "after": "\n", "after_tokens": 1
    }  # fmt: skip
    assert {transition["continuation"] for transition in record["transitions"]} == {"bridge"}


def test_what_drops_reasoning_is_shown_and_can_be_kept(capsys: pytest.CaptureFixture[str], qwen3: Path) -> None:
    words = ("--tokenizer", "multihop-warm", "--chat-template", str(qwen3))
    status, out, _ = check(capsys, *words)
    assert status == 0
    for text in ("left out before a user message", "drops reasoning", "fork: a new row (thinking)", "is now  …"):
        assert text in out
    status, out, _ = check(capsys, *words, "render.keep_thinking=true")
    assert status == 0
    assert "keep: the row continues" in out
    assert "fork" not in out


def test_a_template_that_cannot_be_used_exits_with_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ raise_exception('[never]') }}")
    status, out, err = check(capsys, "--tokenizer", "multihop-warm", "--chat-template", str(file))
    assert status == 1
    assert "[never]" in err
    assert "format" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokenizer", "no/such/folder"), "--tokenizer=no/such/folder"),
        (("--tokenizer", "FOLDER"), "holds no tokenizer"),
        (("--tokenizer", "multihop-warm", "--chat-template", "none.jinja"), "--chat-template none.jinja"),
        (("--tokenizer", "multihop-warm", "render.keep_thinkin=true"), "render.keep_thinking"),
        (("--tokenizer", "multihop-warm", "render.format=llama3"), "render.format"),
        (("--tokenizer", "multihop-warm", "train.steps=3"), "train.steps=3"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    words = tuple(str(tmp_path) if word == "FOLDER" else word for word in words)
    status, _, err = check(capsys, *words)
    assert status == 2
    assert message in err.replace("\n", " ")


def test_a_dry_run_of_train_has_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("train", "--env", "search_r1", "--dry-run")) == 0
    err = capsys.readouterr().err
    assert [line.split(maxsplit=1)[1] for line in err.splitlines() if line.startswith("template")] == [LINE]
