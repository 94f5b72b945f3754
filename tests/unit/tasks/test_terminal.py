"""Exercises for a shell: their solutions solve them, nothing else does, and no exercise is in both splits."""

import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl_tasks.terminal import TerminalExercises
from agentrl_tasks.terminal.data import SHIPPED, Exercises, make_exercise
from agentrl_tasks.terminal.demonstrations import move, put_files
from agentrl_tasks.terminal.exercise import Exercise
from agentrl_tasks.terminal.kinds import FUNCTIONS, KINDS

from agentrl import ConfigError
from agentrl.containers.task_folder import FOLDER_KEY, load_task_folder
from agentrl.core.errors import UnknownNameError

runs_as_nobody = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the agent's programs as nobody")


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder that every user can read, in place of the container's `WORK`."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-exercise-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def run(source: str, work: Path, *program: str) -> int:
    """Run a program's source with the folder in place of `WORK`."""
    return subprocess.run([*program, move(source, work)], cwd=work, capture_output=True).returncode


def is_solved(exercise: Exercise, work: Path) -> bool:
    return run(exercise.contents()["tests/check.py"], work, "python3", "-I", "-S", "-c") == 0


def solve(exercise: Exercise, work: Path) -> None:
    assert run(exercise.contents()["solution/solve.sh"], work, "sh", "-c") == 0


@runs_as_nobody
@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_solves_an_exercise_and_nothing_does_not(kind: str, work: Path) -> None:
    exercise = make_exercise(kind, "train", 0, 1)
    put_files(exercise, work)
    assert not is_solved(exercise, work)
    solve(exercise, work)
    assert is_solved(exercise, work)


@runs_as_nobody
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_solutions_solve_all_variants(kind: str) -> None:
    for number in range(12):
        exercise = make_exercise(kind, "train", 3, number)
        folder = Path(tempfile.mkdtemp(prefix="agentrl-exercise-"))
        folder.chmod(0o755)
        try:
            put_files(exercise, folder)
            assert not is_solved(exercise, folder), exercise
            solve(exercise, folder)
            assert is_solved(exercise, folder), exercise
        finally:
            shutil.rmtree(folder)


def test_a_link_or_a_pipe_is_no_answer(work: Path) -> None:
    exercise = make_exercise("write_file", "train", 0, 1)
    solve(exercise, work)
    (answer,) = work.iterdir()
    text = answer.read_text()
    (work / "elsewhere").write_text(text)
    answer.unlink()
    answer.symlink_to(work / "elsewhere")
    assert not is_solved(exercise, work)
    answer.unlink()
    os.mkfifo(answer)
    assert not is_solved(exercise, work)
    answer.unlink()
    answer.write_text(text)
    assert is_solved(exercise, work)


@runs_as_nobody
def test_programs_of_the_agent_cannot_write_the_reward(work: Path) -> None:
    reward = work / "reward.txt"
    exercise = make_exercise("mend_script", "train", 0, 1)
    put_files(exercise, work)
    script = work / "report.sh"
    script.write_text(f"#!/bin/sh\nid -u > {reward} && echo 1 > {reward}\n")
    script.chmod(0o755)
    assert not is_solved(exercise, work)
    assert not reward.exists()


def test_every_shipped_folder_is_what_the_generator_writes() -> None:
    folders = {path.name: path for path in SHIPPED.iterdir()}
    assert set(folders) == {f"{kind}-0" for kind in KINDS}
    for kind in KINDS:
        folder = folders[f"{kind}-0"]
        files = {
            str(path.relative_to(folder)): path.read_text()
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert files == make_exercise(kind, "train", 0, 0).contents()
        task = load_task_folder(folder)
        assert task.steps[0].grading.is_separate
        assert (task.steps[0].grading.user, task.steps[0].solution) == ("root", folder / "solution")
        assert task.config.environment.network_mode == "no-network"


def test_kinds_are_from_easy_to_hard() -> None:
    levels = [make_exercise(kind, "train", 0, 0).level for kind in KINDS]
    assert levels == sorted(levels)
    assert (len(KINDS), set(levels)) == (10, {1, 2, 3, 4})


def test_no_exercise_is_in_both_splits_and_nearly_all_are_different(tmp_path: Path) -> None:
    tasks = TerminalExercises(train_size=300, eval_size=100, folder=tmp_path)
    train, held_out = tasks.split("train"), tasks.split("eval")
    assert isinstance(train, Exercises)
    assert isinstance(held_out, Exercises)
    digests = Counter(train.exercise(index).digest() for index in range(300))
    held_out_digests = {held_out.exercise(index).digest() for index in range(100)}
    assert len(digests) == 300
    assert len(held_out_digests) == 100
    assert not held_out_digests & set(digests)
    assert not any(tmp_path.iterdir())  # folders are written when their tasks are taken


def test_a_task_names_its_folder(tmp_path: Path) -> None:
    tasks = TerminalExercises(kinds=["find_file", "fix_test"], train_size=4, folder=tmp_path).split("train")
    assert [task.id for task in tasks] == [
        "terminal/train/find_file-0",
        "terminal/train/fix_test-0",
        "terminal/train/find_file-1",
        "terminal/train/fix_test-1",
    ]
    task = tasks[1]
    assert (task.metadata["kind"], task.metadata["level"]) == ("fix_test", 4)
    folder = load_task_folder(Path(task.metadata[FOLDER_KEY]))
    assert folder.instruction.strip() == task.question
    assert (folder.path / "tests" / "test.sh").stat().st_mode & 0o111
    again = TerminalExercises(kinds=["find_file", "fix_test"], train_size=4, folder=tmp_path).split("train")[1]
    assert again == task
    assert len(list(tmp_path.iterdir())) == 4


def test_seeds_change_what_is_trained_and_not_what_is_held_out(tmp_path: Path) -> None:
    first, second = (TerminalExercises(seed=seed, folder=tmp_path) for seed in (0, 1))
    assert first.split("train")[0].question != second.split("train")[0].question
    assert first.split("eval")[0] == second.split("eval")[0]


def test_bad_options_are_named() -> None:
    with pytest.raises(UnknownNameError, match="kind of exercise 'fix_tests'"):
        TerminalExercises(kinds=["fix_tests"])
    with pytest.raises(ConfigError, match=r"tasks\.options\.kinds=\[\]"):
        TerminalExercises(kinds=[])
    with pytest.raises(ConfigError, match=r"tasks\.options\.train_size=-1 is negative"):
        TerminalExercises(train_size=-1)
    with pytest.raises(UnknownNameError, match="split 'test'"):
        TerminalExercises().split("test")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_wrong_function_fails_its_test(function: str) -> None:
    numbers = [
        number
        for number in range(400)
        if f"function {function} " in make_exercise("fix_test", "train", 0, number).instruction
    ]
    assert numbers
    exercise = make_exercise("fix_test", "train", 0, numbers[0])
    name = next(name for name in exercise.files if not name.startswith("test_"))
    variables: dict[str, object] = {}
    exec(exercise.files[name], variables)
    test = exercise.files[f"test_{name}"].split("\n", 1)[1]
    with pytest.raises((AssertionError, LookupError)):
        exec(test, variables)
