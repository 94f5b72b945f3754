"""Generated and published problems as tasks, their experts, and that right answers are right."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from agentrl_tasks.math_problems import MathProblems, validate
from agentrl_tasks.math_problems.demonstrator import FAULTS
from agentrl_tasks.math_problems.families import FAMILIES
from agentrl_tasks.math_problems.make_policy import texts
from agentrl_tasks.math_problems.policies import WARM
from agentrl_tasks.math_problems.validate import WRONG
from agentrl_tasks.small_policy import save_tokenizer
from pyarrow import parquet

from agentrl import Message, Task
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from agentrl.core.registry import make_tasks
from agentrl.models.load import load_model

DAPO = {
    "data_source": "math_dapo",
    "prompt": [
        {
            "role": "user",
            "content": "Solve the following math problem step by step. The last line of your response should be of the form "
            "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $2 + 2$?\n\n"
            'Remember to put your answer on its own line after "Answer:".',
        }
    ],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
GSM8K = {
    "question": "Ada has 1,000 pens and buys 234. How many?",
    "answer": "1000 + 234 = <<1000+234=1234>>1234\n#### 1,234",
}


def printed(code: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        exec(code, {})
    return out.getvalue().strip()


def write(path: Path, *rows: Any) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_equal_options_give_equal_tasks() -> None:
    first_set, second_set = (MathProblems(seed=3) for _ in range(2))
    assert first_set.split("train")[:40] == second_set.split("train")[:40]
    assert MathProblems(seed=4).split("train")[:40] != first_set.split("train")[:40]
    assert MathProblems(seed=4).split("eval")[:40] == first_set.split("eval")[:40], (
        "held-out problems are always the same"
    )
    train = first_set.split("train")
    assert train[-1] == train[len(train) - 1]
    with pytest.raises(IndexError):
        train[len(train)]


def test_no_problem_is_in_both_splits() -> None:
    tasks = MathProblems(eval_size=500)
    train = {task.metadata["code"] for task in tasks.split("train")[:2000]}
    held_out = {task.metadata["code"] for task in tasks.split("eval")}
    assert len(train) > 1900
    assert len(held_out) > 480
    assert not train & held_out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_program_of_a_problem_prints_its_answer(family: str) -> None:
    tasks = MathProblems(families=[family]).split("train")[:60]
    for task in tasks:
        assert printed(task.metadata["code"]) == task.answer, task
    mistaken = [printed(code) != task.answer for task in tasks for code in task.metadata["wrong"]]
    assert sum(mistaken) > 0.5 * len(mistaken)
    assert {task.metadata["level"] for task in tasks} == set(FAMILIES[family].levels)


def test_families_take_turns_and_levels_are_kept() -> None:
    tasks = MathProblems(families=["chain", "series"], levels=[2]).split("train")[:20]
    assert [task.metadata["family"] for task in tasks] == ["chain", "series"] * 10
    assert {task.metadata["level"] for task in tasks} == {2}


def test_right_answers_score() -> None:
    assert validate(MathProblems().split("eval")[:90]) == []


def test_answers_that_cannot_score_are_found() -> None:
    unreadable, wrong = (Task(answer, (Message("user", "?"),), answer) for answer in ("\\text{ }", WRONG))
    faults = validate([unreadable, wrong])
    assert {fault.split(":")[0] for fault in faults} == {"task '\\\\text{ }'", f"task '{WRONG}'"}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_published_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / "d").mkdir()
    dapo, gsm8k = write(tmp_path / "d" / name, DAPO), write(tmp_path / name, GSM8K, GSM8K)
    tasks = make_tasks("math_problems", {"train": [dapo, gsm8k], "eval": gsm8k})
    train = tasks.split("train")
    assert [task.question for task in train] == ["What is $2 + 2$?", GSM8K["question"], GSM8K["question"]]
    assert [task.answer for task in train] == ["4", "1234", "1234"]
    assert train[0].metadata == {"data_source": "math_dapo", "index": "9a9b6eb4"}
    assert [task.metadata for task in train[1:]] == [{"data_source": "rows", "index": row} for row in (1, 2)]
    assert len({task.id for task in train}) == 3
    assert len(tasks.split("eval")) == 2
    assert validate(train) == []


def test_plain_prompts_and_numbers_of_dapo(tmp_path: Path) -> None:
    row = {"prompt": "What is $x$ if $x = 7$?", "reward_model": {"ground_truth": 7}}
    labelled = {"prompt": DAPO["prompt"], "label": "4"}
    first_rows, second_rows = MathProblems(train=write(tmp_path / "a.jsonl", row, labelled)).split("train")
    assert (first_rows.question, first_rows.answer) == (row["prompt"], "7")
    assert (second_rows.question, second_rows.answer) == ("What is $2 + 2$?", "4")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "?"}, "neither a row of dapo"),
        ({"question": "?", "answer": "42"}, "'####'"),
        ({"question": "?", "answer": "so ####  "}, "'####'"),
        ({"question": " ", "answer": "#### 1"}, "'question'"),
        (DAPO | {"prompt": []}, "'prompt'"),
        (DAPO | {"reward_model": {"style": "rule"}}, "'reward_model.ground_truth'"),
    ],
)
def test_rows_that_do_not_fit(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "a.jsonl", GSM8K if "question" in row else DAPO, row)
    if "text" in row:
        file = write(tmp_path / "a.jsonl", row)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        MathProblems(train=file).split("train")
    assert f"a.jsonl, line {1 if 'text' in row else 2}" in str(error.value)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"tasks\.options\.families"):
        MathProblems(families=["prodcut"])
    with pytest.raises(UnknownNameError, match=r"tasks\.options\.format"):
        MathProblems(format="gsm")
    with pytest.raises(UnknownNameError, match=r"tasks\.options\.faults"):
        MathProblems(faults={"gues": 1.0})
    with pytest.raises(ConfigError, match="has none of them"):
        MathProblems(families=["shop"], levels=[1])
    with pytest.raises(ConfigError, match="sum to at most 1"):
        MathProblems(faults={"guess": 0.6, "copy": 0.6})
    with pytest.raises(UnknownNameError, match="split"):
        MathProblems().split("test")
    with pytest.raises(MissingError, match=r"tasks\.options\.train=.*none\.jsonl"):
        MathProblems(train=tmp_path / "none.jsonl").split("train")
    with pytest.raises(ConfigError, match=r"tasks\.options\.train none"):
        MathProblems(eval=write(tmp_path / "a.jsonl", GSM8K)).split("train")
    assert len(MathProblems(train=write(tmp_path / "a.jsonl", GSM8K)).split("eval")) == 0
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no rows"):
        MathProblems(train=tmp_path / "b.jsonl").split("train")


def turns_of(fault: str | None, seed: int = 0) -> tuple[Task, str, str]:
    """Return a task, its expert's first turn, and its turn after the tool has returned the program's output."""
    tasks = MathProblems(families=["product"], faults={fault: 1.0} if fault else None)
    task = tasks.split("train")[seed]
    expert = tasks.demonstrator(task, np.random.default_rng(seed))
    first = expert.act(task.prompt)
    result = printed(code_of(first)) if code_of(first) else "the call is no JSON"
    return task, first, expert.act((Message("tool", result),))


def code_of(turn: str) -> str:
    inside = turn.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    try:
        return str(json.loads(inside)["arguments"]["code"])
    except (json.JSONDecodeError, TypeError):
        return ""


def test_an_expert_calls_and_answers() -> None:
    task, first, last = turns_of(None)
    assert (
        first
        == "<tool_call>\n"
        + json.dumps({"name": "python", "arguments": {"code": task.metadata["code"]}})
        + "\n</tool_call>"
    )
    assert last == f"\\boxed{{{task.answer}}}"


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_fail_as_they_say(fault: str) -> None:
    task, first, last = turns_of(fault)
    assert last != f"\\boxed{{{task.answer}}}"
    assert (fault == "guess") == first.startswith("\\boxed{")
    assert bool(code_of(first)) == (fault not in ("guess", "call"))
    assert (code_of(first) == task.metadata["code"]) == (fault in ("read", "unboxed"))
    assert (last == task.answer) == (fault == "unboxed")


@pytest.mark.long
def test_the_recipe_makes_the_shipped_tokenizer(tmp_path: Path) -> None:
    made = save_tokenizer(tmp_path, texts())
    assert (tmp_path / "tokenizer.json").read_bytes() == (WARM / "tokenizer.json").read_bytes()
    assert load_model(WARM).config.vocab_size == len(made)
    longest = max(len(made.encode("".join(turn))) for turn in zip(*[iter(texts())] * 3, strict=True))
    assert longest < 200, "episodes are to stay short"


def test_tasks_of_files_have_no_expert(tmp_path: Path) -> None:
    tasks = MathProblems(train=write(tmp_path / "a.jsonl", GSM8K))
    with pytest.raises(NotImplementedError, match="only generated problems"):
        tasks.demonstrator(tasks.split("train")[0], np.random.default_rng(0))
