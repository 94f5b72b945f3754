"""Skills of a task: what an agent is told of them."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from agentrl.containers.machine import Command, CommandResult, Machine
from agentrl.containers.spec import MachineSpec
from agentrl.containers.task_folder import load_task_folder
from agentrl.containers.task_skills import agent_instruction
from agentrl.core.errors import TaskError
from tests.fake_machine import FakeMachine, write_task

CHARTS = b"---\nname: charts\ndescription: Draw <charts>.\nlicense: MIT\n---\n# Charts\n"


def tell(tmp_path: Path, files: dict[str, bytes], result: CommandResult, skills_dir: str = "/skills") -> str:
    def answer(machine: FakeMachine, command: Command) -> CommandResult | None:
        assert command.command[-1] == skills_dir
        return result

    folder = load_task_folder(write_task(tmp_path / "task", "image", "echo", skills_dir=skills_dir))
    return asyncio.run(
        agent_instruction(folder, cast(Machine, FakeMachine("a", MachineSpec(image="i"), files, answer)))
    )


def test_skills_are_named_after_the_instruction(tmp_path: Path) -> None:
    text = tell(tmp_path, {"/app/s/charts/SKILL.md": CHARTS}, CommandResult(0, "/app/s\ncharts/SKILL.md\n"), "s")
    assert text == (
        "Write 42 to answer.txt.\n\n<available_skills>\n  <skill>\n    <name>charts</name>\n"
        "    <description>Draw &lt;charts&gt;.</description>\n    <location>/app/s/charts/SKILL.md</location>\n"
        "  </skill>\n</available_skills>\n"
    )


def test_a_folder_without_skills_says_nothing(tmp_path: Path) -> None:
    assert tell(tmp_path, {}, CommandResult(0, "/skills\n")) == "Write 42 to answer.txt.\n"


def test_a_missing_folder_and_a_skill_without_a_name_are_faults_of_the_task(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"environment\.skills_dir=/skills: cannot cd"):
        tell(tmp_path / "missing", {}, CommandResult(2, "cannot cd to /skills\n"))
    for number, text in enumerate([b"# Charts", b"---\nname: a\n---\n", b"---\n[\n---\n"]):
        with pytest.raises(TaskError, match=r"/skills/a/SKILL\.md has no name and description"):
            tell(tmp_path / str(number), {"/skills/a/SKILL.md": text}, CommandResult(0, "/skills\na/SKILL.md\n"))
