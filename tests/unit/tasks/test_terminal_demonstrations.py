"""Demonstrations of the shell's exercises: what they show solves exercises, is what commands print, and knows no answer."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from agentrl_tasks.terminal.__main__ import main
from agentrl_tasks.terminal.data import make_exercise
from agentrl_tasks.terminal.demonstrations import DONE, FAULTS, Chats, demonstrate, move, put_files, run_commands
from agentrl_tasks.terminal.exercise import Exercise
from agentrl_tasks.terminal.kinds import COLORS, KEYS, KINDS, NAMES, PRACTICE, THINGS
from agentrl_tools.terminal.bash import as_result

from agentrl import ConfigError
from agentrl.containers.machine import CommandResult
from agentrl.core.errors import UnknownNameError
from agentrl.core.types import ToolCall

runs_as_nobody = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start the agent's programs as nobody")
NAME = re.compile(rf"\b(?:{'|'.join((*COLORS, *THINGS, *NAMES, *KEYS))})\b|\d{{2,}}")
"""Names and numbers by which exercises differ."""


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder that every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-exercise-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def reward(exercise: Exercise, commands: list[str], work: Path) -> float:
    """Return the reward of the exercise's own check after commands that run in a folder in place of the machine's."""
    put_files(exercise, work)
    for command in commands:
        subprocess.run(["bash", "-c", move(command, work)], cwd=work, capture_output=True)
    check = move(exercise.contents()["tests/check.py"], work)
    return float(subprocess.run(["python3", "-I", "-S", "-c", check], capture_output=True).returncode == 0)


@runs_as_nobody
@pytest.mark.parametrize("kind", KINDS)
def test_a_demonstration_without_a_mistake_has_reward_1(kind: str, work: Path) -> None:
    exercise = make_exercise(kind, "train", 1, 0)
    demonstration = demonstrate(exercise, None, Random(0))
    assert reward(exercise, [command for command, _ in demonstration], work) == 1.0
    assert not any("exit status" in observation for _, observation in demonstration)


@runs_as_nobody
@pytest.mark.parametrize("fault", FAULTS)
def test_a_demonstration_with_a_mistake_has_reward_0(fault: str, work: Path) -> None:
    kind = "copy_file" if fault == "forgotten" else "count_lines"
    exercise = make_exercise(kind, "train", 1, 0)
    demonstration = demonstrate(exercise, fault, Random(0))
    assert [command for command, _ in demonstration] != list(exercise.commands)
    assert reward(exercise, [command for command, _ in demonstration], work) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_commands_have_only_names_that_the_conversation_has_shown(kind: str) -> None:
    for number in range(3):
        exercise = make_exercise(kind, "train", 1, number)
        seen = exercise.instruction
        for command, observation in demonstrate(exercise, None, Random(0)):
            shown = set(NAME.findall(seen))
            assert set(NAME.findall(command)) <= shown | set(NAME.findall(kind)), (command, seen)
            seen += observation


def test_what_is_read_after_a_command_is_what_the_tool_answers() -> None:
    exercise = make_exercise("write_file", "train", 1, 0)
    call = ToolCall("1", "bash", {"command": ""})
    commands = ["true", "echo a; echo b >&2", "echo c; exit 3", "exit 4"]
    results = [(0, ""), (0, "a\nb\n"), (3, "c\n"), (4, "")]
    expected = [as_result(call, CommandResult(*result), 9.0, 100).content for result in results]
    assert [observation for _, observation in run_commands(exercise, commands)] == expected


def test_chats_are_the_same_every_time_and_have_the_tool_of_a_run() -> None:
    chats = Chats({"idle": 0.5}, 1, ["write_file", "copy_file"])
    rows: list[dict[str, Any]] = [chats[number] for number in range(12)]
    assert rows[:2] == [Chats({"idle": 0.5}, 1, ["write_file", "copy_file"])[number] for number in range(2)]
    lengths = {len(row["messages"]) for row in rows}
    assert lengths == {2, 4, 6}, "nothing, one command, or two"
    for row in rows:
        assert row["messages"][-1] == {"role": "assistant", "content": DONE}
        assert [tool["function"]["name"] for tool in row["tools"]] == ["bash"]
    call = next(row for row in rows if len(row["messages"]) == 4)["messages"][1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"])["command"].startswith("echo '")


@runs_as_nobody
@pytest.mark.parametrize("kind", PRACTICE)
def test_practice_of_copying_numbers_has_reward_1_and_numbers_of_all_lengths(kind: str, work: Path) -> None:
    exercises = [make_exercise(kind, "train", 1, number) for number in range(60)]
    lengths = {len(number) for exercise in exercises for number in re.findall(r"\d+", exercise.instruction)}
    assert lengths == {1, 2, 3, 4, 5, 6}
    commands = [command for command, _ in demonstrate(exercises[0], None, Random(0))]
    assert reward(exercises[0], commands, work) == 1.0


def test_practice_takes_the_place_of_its_share_of_exercises() -> None:
    chats = [
        Chats({"idle": 1.0}, 1, ["copy_file"], practice=share)[number] for share in (0.0, 0.5) for number in range(20)
    ]
    is_practice = ["Create the folder" not in chat["messages"][0]["content"] for chat in chats]
    assert not any(is_practice[:20])
    assert 4 < sum(is_practice[20:]) < 16
    assert all((len(chat["messages"]) > 2) == practises for chat, practises in zip(chats, is_practice, strict=True))


def test_bad_faults_are_named() -> None:
    with pytest.raises(UnknownNameError, match="fault 'lazy'"):
        Chats({"lazy": 0.1}, 1)
    with pytest.raises(ConfigError, match=r"tasks\.options\.faults"):
        Chats({"idle": 1.1}, 1)


def test_conversations_begin_as_those_of_an_agent_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chats.jsonl"
    words = ["demonstrate", str(file), "--count", "2", "--kinds", "write_file", "--system", ""]
    monkeypatch.setattr("sys.argv", ["terminal", *words])
    main()
    for line in file.read_text().splitlines():
        first, second, *_ = json.loads(line)["messages"]
        assert first == {"role": "system", "content": ""}
        assert second["content"].startswith("Write the text")
    monkeypatch.setattr("sys.argv", ["terminal", *words[:1], str(tmp_path / "other.jsonl"), "--kinds", "write_fil"])
    with pytest.raises(SystemExit, match=r"write_fil.*--kinds"):
        main()
