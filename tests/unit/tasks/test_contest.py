"""Generated problems and published rows."""

import contextlib
import io
import json
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from agentrl_tasks.contest import Contest, make_policy
from agentrl_tasks.contest.data import FAMILIES, Generated, is_held_out
from agentrl_tasks.contest.problem import examples
from agentrl_tasks.small_policy import save_tokenizer

from agentrl.config.load import find_config, load_config
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from agentrl.core.registry import model_folder
from agentrl.core.task import Task
from agentrl.models.load import load_model, load_tokenizer
from agentrl.render.registry import make_renderer
from agentrl.rewards.programs import program_in


def run(program: str, stdin: str) -> str | None:
    """Run a program of the taskset's own in this process; None where it fails."""
    state_before, out = sys.stdin, io.StringIO()
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except Exception:
        return None
    finally:
        sys.stdin = state_before
    return out.getvalue()


def passes(program: str | None, task: Task) -> bool:
    if program is None:
        return False
    printed = (run(program, stdin) for stdin in task.answer["inputs"])
    return all(
        text is not None and text.split() == expected.split()
        for text, expected in zip(printed, task.answer["outputs"], strict=True)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_and_functions_agree(family: str) -> None:
    for number in range(25):
        problem = FAMILIES[family](Random(number))
        for example in examples(problem, Random(number), 6):
            printed = run(problem.program, example.input)
            assert printed is not None, (problem.program, example)
            assert printed.split() == example.output.split(), (problem.program, example)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_splits_have_problems_of_every_family(family: str) -> None:
    held_out = Counter(is_held_out(FAMILIES[family](Random(number))) for number in range(200))
    assert 20 < held_out[True] < 100, held_out


def test_equal_options_give_equal_tasks_and_other_seeds_others() -> None:
    contest, same, other_contest = Contest(seed=3), Contest(seed=3), Contest(seed=4)
    for split in ("train", "validation", "eval"):
        tasks = contest.split(split)[:20]
        assert tasks == same.split(split)[:20] == [same.split(split)[i] for i in range(20)]
        assert tasks != other_contest.split(split)[:20]
    assert len({task.id for split in ("train", "validation", "eval") for task in contest.split(split)[:50]}) == 150
    assert contest.split("train")[-1] == contest.split("train")[99_999]
    with pytest.raises(IndexError):
        contest.split("train")[100_000]
    with pytest.raises(UnknownNameError, match="split 'test'"):
        contest.split("test")


def test_held_out_problems_are_in_no_other_split() -> None:
    contest = Contest(families=tuple(FAMILIES), train_size=600, eval_size=300)
    keys = {
        split: {contest.problem(task).key for task in contest.split(split)} for split in ("train", "validation", "eval")
    }
    assert not keys["eval"] & (keys["train"] | keys["validation"])
    assert len(keys["train"]) > 200
    assert Counter(task.metadata["family"] for task in contest.split("train")) == dict.fromkeys(FAMILIES, 100)


def test_a_task_shows_its_public_example_and_hides_the_rest() -> None:
    contest = Contest(public=1, hidden=5)
    for task in contest.split("train")[:50]:
        problem = contest.problem(task)
        assert task.question.startswith(problem.statement + "\n\nInput:\n")
        example_input, expected = task.question.partition("Input:\n")[2].split("\nOutput:\n")
        assert problem.solve(example_input).split() == expected.split()
        assert len(task.answer["inputs"]) == len(task.answer["outputs"]) == 5
        assert len({example_input, *(text.rstrip() for text in task.answer["inputs"])}) == 6, "no hidden test is shown"
        assert not any(text.rstrip() in task.question for text in task.answer["inputs"])
    assert "Input:" not in Contest(public=0).split("train")[0].question


def test_experts_solve_and_slips_fail() -> None:
    def solved(slips: float) -> float:
        contest = Contest(slips=slips)
        rng = np.random.default_rng(0)
        tasks = contest.split("train")[:200]
        return sum(passes(program_in(contest.demonstrator(task, rng).act(task.prompt)), task) for task in tasks) / 200

    assert solved(0.0) == 1.0
    assert solved(1.0) < 0.15, "some slips make no difference on the tests drawn"
    assert 0.3 < solved(0.6) < 0.6


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"families": ["list"]}, UnknownNameError, "Did you mean 'lists'"),
        ({"families": []}, ConfigError, "families not empty"),
        ({"hidden": 0}, ConfigError, "'hidden': 0"),
        ({"public": -1}, ConfigError, "public=-1"),
        ({"slips": 1.5}, ConfigError, "slips=1.5"),
        ({"functions": "run"}, ConfigError, "functions='run'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Contest(**options)


APPS = {
    "problem_id": 7,
    "question": "Double it.\n",
    "solutions": '["print(2*int(input()))"]',
    "input_output": json.dumps({"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}),
    "difficulty": "interview",
}
ROWS = {
    "apps": APPS,
    "taco with lists of lines": {
        "question": "Double it.",
        "input_output": {"inputs": [["1", ""], "2\n", "3\n"], "outputs": [["2", ""], "4\n", "6\n"]},
        "source": "codeforces",
    },
    "deepcoder": {
        "problem": "Double it.",
        "tests": json.dumps([{"input": f"{n}\n", "output": f"{2 * n}\n", "type": "stdin_stdout"} for n in (1, 2, 3)]),
        "metadata": json.dumps({"func_name": None}),
    },
    "code contests": {
        "description": "Double it.",
        "public_tests": {"input": ["9\n"], "output": ["18\n"]},
        "private_tests": {"input": ["1\n"], "output": ["2\n"]},
        "generated_tests": {"input": ["2\n", "3\n"], "output": ["4\n", "6\n"]},
    },
    "code contests with public tests alone": {
        "description": "Double it.",
        "public_tests": {"input": ["1\n", "2\n", "3\n"], "output": ["2\n", "4\n", "6\n"]},
        "private_tests": {"input": [], "output": []},
    },
    "own": {"statement": "Double it.", "tests": {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}},
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ROWS)
def test_published_rows(name: str, tmp_path: Path) -> None:
    contest = Contest(train=write(tmp_path / "set.jsonl", ROWS[name]))
    [task] = contest.split("train")
    assert task.question == "Double it."
    assert task.answer == {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4\n", "6\n"]}
    assert task.id == "contest/train/set.jsonl:1"
    assert task.metadata["family"] == "set"
    assert not contest.split("eval")
    with pytest.raises(UnknownNameError):
        contest.split("validation")
    with pytest.raises(NotImplementedError, match="no demonstrations"):
        contest.demonstrator(task, np.random.default_rng(0))


def test_so_many_tests_are_kept(tmp_path: Path) -> None:
    [task] = Contest(train=[write(tmp_path / "a.jsonl", APPS)], max_tests=2).split("train")
    assert task.answer == {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    assert task.metadata["difficulty"] == "interview"


FUNCTIONS = [
    {**APPS, "input_output": json.dumps({"fn_name": "double", "inputs": [[1]], "outputs": [2]})},
    {"problem": "p", "tests": [{"input": "1", "output": "2", "type": "functional"}]},
    {"problem": "p", "tests": [{"input": "1", "output": "2"}], "metadata": {"func_name": "double"}},
]


@pytest.mark.parametrize("row", FUNCTIONS)
def test_rows_that_want_a_function(row: dict[str, Any], tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", APPS, row)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 has tests .* that call a function.*functions=skip"):
        Contest(train=file).split("train")
    assert [task.id for task in Contest(train=file, functions="skip").split("train")] == ["contest/train/a.jsonl:1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_output": "{}"}, "no text of the problem"),
        ({"question": "q"}, "no tests"),
        ({"question": "q", "input_output": ""}, "no tests"),
        ({"question": "q", "input_output": "{"}, "that is not JSON"),
        ({"question": "q", "input_output": {"inputs": ["1"], "outputs": []}}, "lists of the same length"),
        ({"question": "q", "input_output": {"inputs": [1], "outputs": ["1"]}}, "neither a text nor a list of lines"),
        ({"question": "q", "tests": [{"in": "1"}]}, "other elements than"),
        ({"question": "q", "tests": 5}, "a int"),
    ],
)
def test_bad_rows_name_their_place(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 1 .*{message}"):
        Contest(train=write(tmp_path / "a.jsonl", row)).split("train")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"tasks\.options\.train=.*nowhere"):
        Contest(train=tmp_path / "nowhere.jsonl").split("train")
    with pytest.raises(ConfigError, match=r"tasks\.options\.train is not"):
        Contest(eval=write(tmp_path / "a.jsonl", APPS)).split("eval")


def test_generated_needs_no_files() -> None:
    assert isinstance(Contest().split("train"), Generated)


def test_the_shipped_policy_has_the_recipes_tokenizer_and_room_for_its_programs(tmp_path: Path) -> None:
    folder = model_folder("code-contest-warm")
    assert folder is not None
    save_tokenizer(tmp_path, make_policy.texts())
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    model = load_model(folder)
    assert model.config.vocab_size == len(load_tokenizer(folder))
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4_000_000
    config, renderer = load_config(find_config("code_contest/cpu")), make_renderer(load_tokenizer(folder))
    contest, rng = Contest(slips=0.5), np.random.default_rng(0)
    for task in contest.split("eval")[:100]:
        message = len(renderer.encode(contest.demonstrator(task, rng).act(task.prompt))) + 1
        assert message <= config.sampler.max_new_tokens
        assert len(renderer.render(task.prompt).token_ids) + message <= config.rollout.max_tokens
