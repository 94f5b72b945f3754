"""Grading on machines without a daemon: what is done in which order, and what becomes of trouble."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.containers.grading import (
    Grade,
    GradingFailure,
    GradingMode,
    grade,
    is_separate,
    parse_rewards,
    single_reward,
)
from agentrl.containers.machine import Command, CommandResult, Machine
from agentrl.containers.spec import MachineSpec
from agentrl.containers.task_folder import load_task_folder
from agentrl.core.errors import TaskError
from tests.fake_machine import Answer, FakeMachine, write_task

IMAGE = {"/app/answer.txt": b"0", "/app/old.txt": b"old"}
WORK = {"/app/answer.txt": b"42", "/app/conftest.py": b"forged", "/logs/verifier/reward.json": b'{"reward": 9}'}
TEST = "/tests/test.sh"


def answer_tests(files: dict[str, bytes], result: CommandResult | None = None) -> Answer:
    def answer(machine: FakeMachine, command: Command) -> CommandResult | None:
        if command.command != TEST:
            return None
        machine.files |= {path: content for path, content in files.items() if machine.files["/app/answer.txt"] == b"42"}
        return result or CommandResult(1, "1 passed")

    return answer


def run_grade(
    folder: Path,
    answer: Answer,
    *,
    mode: GradingMode = "task",
    is_last: bool = True,
    more_work: Mapping[str, bytes] = {},
    services: Mapping[str, FakeMachine] = {},
) -> tuple[Grade | Exception, FakeMachine, FakeMachine]:
    spec = MachineSpec(image="image")
    agent, clean = FakeMachine("agent", spec, {**WORK, **more_work}, answer), FakeMachine("clean", spec, IMAGE, answer)

    agent.services |= services

    async def open_clean() -> Machine:
        return cast(Machine, clean)

    async def main() -> Grade | Exception:
        try:
            return await grade(
                load_task_folder(folder), 0, cast(Machine, agent), open_clean, mode=mode, is_last=is_last
            )
        except Exception as error:
            return error

    return asyncio.run(main()), agent, clean


REWARDED = answer_tests(
    {"/logs/verifier/reward.json": b'{"reward": 0.5, "style": 1}', "/logs/verifier/reward.txt": b"0"}
)


def test_tests_run_in_a_clean_machine_after_the_agent_has_ended(tmp_path: Path) -> None:
    result, agent, clean = run_grade(write_task(tmp_path / "task", "image", "echo"), REWARDED)
    assert result == Grade(
        {"reward": 0.5, "style": 1.0}, False, "1 passed", False, {"/app/conftest.py": "tools load it by themselves"}
    )
    assert agent.log.index("kill_all") < agent.log.index("download /app")
    assert not any(line.startswith(("upload", "run")) for line in agent.log), (
        "nothing of the tests is in the agent's machine"
    )
    assert clean.files["/app/answer.txt"] == b"42"
    assert "/app/old.txt" not in clean.files
    order = [
        clean.log.index(line)
        for line in ("upload_tar", "upload /tests", f"run {TEST}", "stop", "download /logs/verifier/reward.json")
    ]
    assert order == sorted(order)
    assert clean.is_closed
    assert not agent.is_closed


def test_names_of_an_agent_that_are_no_text_can_be_sent(tmp_path: Path) -> None:
    name = b"/app/\xff/a.pth".decode(errors="surrogateescape")
    result, _, _ = run_grade(write_task(tmp_path / "task", "image", "echo"), REWARDED, more_work={name: b""})
    assert isinstance(result, Grade)
    assert set(result.refused) == {"/app/conftest.py", "/app/\\xff/a.pth"}


def test_before_the_last_step_the_agents_processes_run_on(tmp_path: Path) -> None:
    _, agent, _ = run_grade(write_task(tmp_path / "task", "image", "echo"), REWARDED, is_last=False)
    assert "kill_all" not in agent.log


@pytest.mark.parametrize(("toml", "mode"), [("", "shared"), ('[verifier]\nenvironment_mode = "shared"', "task")])
def test_in_shared_mode_the_grade_is_forgeable(tmp_path: Path, toml: str, mode: GradingMode) -> None:
    result, agent, clean = run_grade(
        write_task(tmp_path / "task", "image", "echo", toml=toml), REWARDED, mode=mode, is_last=False
    )
    assert isinstance(result, Grade)
    assert result.forgeable
    assert not clean.log
    removed = [line for line in agent.log if line.startswith("run rm")]
    assert removed == [
        "run rm -rf -- /logs/verifier/reward.json /logs/verifier/reward.txt",
        "run rm -rf -- /tests /logs/verifier",
    ], "old rewards before, and what the next step must not see after"


def test_a_task_that_says_nothing_is_graded_separately(tmp_path: Path) -> None:
    folder = load_task_folder(write_task(tmp_path / "task", "image", "echo"))
    assert is_separate(folder, 0, "task")
    assert not is_separate(folder, 0, "shared")
    shared = load_task_folder(
        write_task(tmp_path / "shared", "image", "echo", toml='[verifier]\nenvironment_mode = "shared"')
    )
    assert not is_separate(shared, 0, "task")
    assert is_separate(shared, 0, "separate")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "wrote neither"),
        ({"/logs/verifier/reward.json": b""}, "has no rewards"),
        ({"/logs/verifier/reward.json": b'{"reward": NaN}'}, "no finite number"),
        ({"/logs/verifier/reward.json": b"{" + b" " * 2**17 + b"}"}, "cannot be read"),
    ],
)
def test_tests_without_a_reward_are_a_failure_and_no_reward_of_zero(
    tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    error, _, clean = run_grade(write_task(tmp_path / "task", "image", "echo"), answer_tests(files))
    assert isinstance(error, GradingFailure)
    assert message in str(error)
    assert clean.is_closed


@pytest.mark.parametrize("result", [CommandResult(None, "", timed_out=True), CommandResult(None, "", flooded=True)])
def test_tests_that_a_limit_ends_give_nothing(tmp_path: Path, result: CommandResult) -> None:
    files = {"/logs/verifier/reward.json": b'{"reward": 1}'}
    graded, _, _ = run_grade(write_task(tmp_path / "task", "image", "echo"), answer_tests(files, result))
    assert isinstance(graded, Grade)
    assert graded.at_limit
    assert graded.rewards == {}
    assert single_reward(graded.rewards) == 0.0


def test_artifacts_are_carried_in_place_of_the_working_folder(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", "image", "echo", toml='artifacts = ["/app/answer.txt", "/app/none"]')
    graded, _, clean = run_grade(task, REWARDED)
    assert isinstance(graded, Grade)
    assert not graded.refused
    assert clean.files["/app/old.txt"] == b"old"
    assert clean.files["/app/answer.txt"] == b"42"


SERVICES = """artifacts = ["/app", { source = "/var/dump", service = "db" }]
[[verifier.collect]]
command = "dump"
service = "db"
"""


def test_artifacts_and_commands_of_a_service_are_those_of_its_container(tmp_path: Path) -> None:
    database = FakeMachine("db", MachineSpec(image="image"), {"/var/dump/a.sql": b"1"}, REWARDED)
    task = write_task(tmp_path / "task", "image", "echo", toml=SERVICES)
    result, agent, clean = run_grade(task, REWARDED, services={"db": database})
    assert isinstance(result, Grade)
    assert database.log == ["run dump", "download /var/dump"]
    assert "run dump" not in agent.log
    assert clean.files["/var/dump/a.sql"] == b"1"


def test_artifacts_of_two_services_are_not_one_in_the_other(tmp_path: Path) -> None:
    toml = 'artifacts = ["/app", { source = "/app/dump", service = "db" }]'
    result, _, _ = run_grade(write_task(tmp_path / "task", "image", "echo", toml=toml), REWARDED)
    assert isinstance(result, TaskError)
    assert "the artifacts /app of main and /app/dump of db one in the other" in str(result)


@pytest.mark.parametrize("artifact", ["/", "/tests", "/tests/x", "/logs", "/logs/verifier"])
def test_artifacts_reach_neither_tests_nor_rewards(tmp_path: Path, artifact: str) -> None:
    error, _, _ = run_grade(
        write_task(tmp_path / "task", "image", "echo", toml=f'artifacts = ["{artifact}"]'), REWARDED
    )
    assert isinstance(error, TaskError)
    assert artifact in str(error)


def test_a_working_folder_that_is_the_root_is_not_carried(tmp_path: Path) -> None:
    def answer(machine: FakeMachine, command: Command) -> CommandResult | None:
        return CommandResult(0, "/\n") if command.command == "pwd -P" else None

    error, _, _ = run_grade(write_task(tmp_path / "task", "image", "echo"), answer)
    assert isinstance(error, TaskError)
    assert "environment.workdir" in str(error)


@pytest.mark.parametrize(
    ("path", "content", "rewards"),
    [
        ("reward.txt", b" 1\n", {"reward": 1.0}),
        ("reward.json", b"0.25", {"reward": 0.25}),
        ("reward.json", b'{"a": 1, "b": -0.5}', {"a": 1.0, "b": -0.5}),
    ],
)
def test_rewards_are_read(path: str, content: bytes, rewards: dict[str, float]) -> None:
    assert parse_rewards(path, content) == rewards


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("reward.txt", b"inf"),
        ("reward.txt", b"one"),
        ("reward.txt", b"\xff"),
        ("reward.json", b"[1]"),
        ("reward.json", b"{}"),
        ("reward.json", b'{"a": "1"}'),
        ("reward.json", b'{"a": 1e999}'),
        ("reward.json", b"[" * 100_000),
    ],
)
def test_what_is_no_reward_is_refused(path: str, content: bytes) -> None:
    with pytest.raises(GradingFailure, match="reward"):
        parse_rewards(path, content)


def test_an_episode_gets_one_number() -> None:
    numbers: list[tuple[dict[str, Any], float]] = [({"reward": 0.5, "x": 9}, 0.5), ({"a": 1, "b": 0}, 0.5), ({}, 0.0)]
    for rewards, number in numbers:
        assert single_reward(rewards) == number
