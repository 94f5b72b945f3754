"""Published rows as tasks: questions, answers, splits, and messages for invalid rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from agentrl_tasks.search_qa import SearchQa
from pyarrow import parquet

from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from agentrl.core.registry import make_env, make_tasks, tool_service
from agentrl.core.types import Message

PROMPT = make_env("search_r1").prompt


def published(index: int, question: str, *answers: str, source: str = "nq", split: str = "train") -> dict[str, Any]:
    """A row as the published files have it; their column ``question`` lacks the question mark of the prompt."""
    return {
        "id": f"{split}_{index}",
        "question": question.rstrip("?"),
        "golden_answers": list(answers),
        "data_source": source,
        "prompt": [{"role": "user", "content": PROMPT.replace("{question}", question)}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": list(answers)}, "style": "rule"},
        "extra_info": {"index": index, "split": split},
        "metadata": {"pages": ["much text"]},
    }


ROWS = [
    published(0, "who got the first nobel prize in physics?", "Wilhelm Conrad Röntgen", "Röntgen"),
    published(1, "when is the next deadpool movie being released?", "May 18, 2018"),
    published(0, "Which magazine was started first, A or B?", "The Arthur's Magazine", source="hotpotqa"),
]


def write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_published_rows(tmp_path: Path, name: str) -> None:
    tasks = make_tasks("search_qa", {"train": write(tmp_path / name, ROWS)})
    train = tasks.split("train")
    assert [task.question for task in train] == [
        row["prompt"][0]["content"].split("Question: ")[1].strip() for row in ROWS
    ]
    assert train[0].question == "who got the first nobel prize in physics?"
    assert train[0].answer == ["Wilhelm Conrad Röntgen", "Röntgen"]
    assert [task.metadata for task in train] == [
        {"data_source": "nq", "index": 0},
        {"data_source": "nq", "index": 1},
        {"data_source": "hotpotqa", "index": 0},
    ]
    assert [task.id for task in train] == [f"search_qa/train/{index}" for index in range(3)]
    assert train[-1] == train[2] == train[1:][1]
    assert len(train) == 3
    with pytest.raises(IndexError):
        train[3]
    assert tasks.split("train") is train, "files are read once"
    assert list(tasks.split("eval")) == []
    assert json.loads(json.dumps(train[0].metadata)) == train[0].metadata


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_gold_answers_score_1_and_others_0(tmp_path: Path, name: str) -> None:
    env = make_env("search_r1")
    for task in SearchQa(train=write(tmp_path / name, ROWS)).split("train"):
        for answer, expected in [
            *((gold, 1.0) for gold in task.answer),
            (task.answer[0].upper(), 1.0),
            ("no idea", 0.0),
        ]:
            (prompt,), _ = env.reset(options={"task": task})
            assert prompt.content == PROMPT.replace("{question}", task.question)
            _, reward, terminated, _, _ = env.step(Message("assistant", f"<answer> {answer} </answer>"))
            assert (terminated, reward) == (True, expected)


def test_files_add_up_and_evaluation_takes_its_sources_in_turn(tmp_path: Path) -> None:
    first = [published(i, f"q{i}?", "a", source="nq", split="test") for i in range(4)]
    second = [published(i, f"r{i}?", "b", source=("popqa", "bamboogle")[i % 2], split="test") for i in range(3)]
    files = [write(tmp_path / "nq.parquet", first), write(tmp_path / "rest.jsonl", second)]
    tasks = SearchQa(train=files, eval=files)
    assert [task.question for task in tasks.split("train")] == ["q0?", "q1?", "q2?", "q3?", "r0?", "r1?", "r2?"]
    evals = tasks.split("eval")
    assert [task.question for task in evals] == ["q0?", "r0?", "r1?", "q1?", "r2?", "q2?", "q3?"]
    assert [task.metadata["data_source"] for task in evals[:3]] == ["nq", "popqa", "bamboogle"]
    assert len({task.id for task in [*evals, *tasks.split("train")]}) == 14
    assert evals[1].id == "search_qa/eval/4", "a task keeps its name whatever the order"


@pytest.mark.parametrize(
    ("change", "question"),
    [
        ({"prompt": None}, "Where is X"),
        ({"prompt": [{"role": "user", "content": "Where is X?"}]}, "Where is X"),
        ({"question": None}, "Where is X?"),
        ({"question": None, "prompt": "Think. Question: Where is X?\n"}, "Where is X?"),
        ({"question": None, "prompt": [{"role": "system", "content": "-"}, *published(0, "Q?", "a")["prompt"]]}, "Q?"),
        ({"question": "Or this", "prompt": "Question: one? Answer: 1. Question: Or this?"}, "Or this"),
        ({"question": " Why? "}, "Why?"),
    ],
)
def test_where_the_question_stands(tmp_path: Path, change: dict[str, Any], question: str) -> None:
    [task] = SearchQa(train=write(tmp_path / "a.jsonl", [published(0, "Where is X?", "Y") | change])).split("train")
    assert task.question == question


def test_own_rows_need_a_question_and_answers_only(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", [{"question": "Why?", "golden_answers": "because"}])
    [task] = SearchQa(train=path).split("train")
    assert (task.answer, task.metadata) == (["because"], {"data_source": "mine", "index": 1})


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"question": None, "prompt": "Where?"}, r"has no 'question', and no message of its 'prompt' with a question"),
        ({"question": "  ", "prompt": None}, r"has '  ' as its 'question'"),
        ({"question": 5, "prompt": None}, r"has 5 as its 'question', which must be a text"),
        ({"reward_model": None, "golden_answers": None}, r"has neither 'reward_model.ground_truth.target' nor"),
        ({"reward_model": {"ground_truth": {"target": []}}}, r"has \[\] as 'reward_model.ground_truth.target'"),
        ({"reward_model": None, "golden_answers": [7]}, r"has \[7\] as 'golden_answers', which must be"),
    ],
)
def test_a_bad_row_is_told_with_place_key_and_the_keys_there(
    tmp_path: Path, suffix: str, change: dict[str, Any], fault: str
) -> None:
    good, bad = published(0, "Q?", "a"), published(1, "R?", "b") | change
    for key in ("question", "golden_answers", "prompt", "reward_model"):  # one type a column, as parquet wants it
        if suffix == "parquet" and bad[key] is not None and type(bad[key]) is not type(good[key]):
            good[key] = bad[key]
    rows = [bad, bad] if suffix == "parquet" else [good, bad]
    path = write(tmp_path / f"train.{suffix}", rows)
    where = "row 1" if suffix == "parquet" else "line 2"
    with pytest.raises(ConfigError, match=rf"train\.{suffix}, {where} {fault}.*; it has: .*data_source.*metadata"):
        SearchQa(train=path).split("train")


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Known: eval, train"):
        SearchQa().split("test")
    with pytest.raises(ConfigError, match=r"tasks\.options\.train is not set"):
        SearchQa().split("train")
    gone = SearchQa(train=["a.jsonl", "b.parquet"], eval="c.jsonl", corpus="d.jsonl")
    with pytest.raises(MissingError) as error_info:
        gone.split("train")
    for option, name in (("train", "a.jsonl"), ("train", "b.parquet"), ("eval", "c.jsonl"), ("corpus", "d.jsonl")):
        assert f"tasks.options.{option}={name}: there is no such file" in str(error_info.value)
    for name, content, fault in (
        ("empty.jsonl", "\n", r"tasks\.options\.train=.*empty\.jsonl: the file holds no rows"),
        ("broken.jsonl", "{", r"broken\.jsonl, line 1 .*is no JSON"),
        ("rows.txt", "a,b", r"tasks\.options\.train=.*rows\.txt: rows are read from"),
        ("rows.parquet", "a,b", r"tasks\.options\.train=.*rows\.parquet is not a parquet file"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=fault):
            SearchQa(train=str(tmp_path / name)).split("train")


def test_a_corpus_of_its_own_goes_to_the_search_server(tmp_path: Path) -> None:
    documents = [{"id": index, "contents": f'"Title {index}"\ntext'} for index in range(3)]
    tasks = SearchQa(corpus=write(tmp_path / "corpus.jsonl", documents))
    arguments = tool_service("search").launch_arguments({}, tasks, tmp_path / "run")
    assert arguments == [f"--config={tmp_path / 'run' / 'server.yaml'}"]
    config = yaml.safe_load((tmp_path / "run" / "server.yaml").read_text())
    assert config["tools"]["search"]["corpus"] == {"default": str(tmp_path / "run" / "default.jsonl")}
    written = [json.loads(line) for line in (tmp_path / "run" / "default.jsonl").read_text().splitlines()]
    assert written == [{"id": str(row["id"]), "contents": row["contents"]} for row in documents]
    bad = SearchQa(corpus=write(tmp_path / "bad.jsonl", [*documents, {"id": 3, "text": "x"}]))
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 4 has no 'contents'; it has: id, text"):
        tool_service("search").launch_arguments({}, bad, tmp_path / "run")
    assert SearchQa().corpora() == {}
