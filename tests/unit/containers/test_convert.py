"""Older terminal-bench folders and rows of SWE-bench as folders of tasks; the converted tests of a repository run here."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import main
from agentrl.containers.convert import REPOSITORY, convert_swe_row, convert_terminal_bench
from agentrl.containers.task_folder import load_task_folder
from agentrl.core.errors import ConfigError

TASK = {
    "instruction": "Write hello.\n",
    "difficulty": "easy",
    "tags": ["files"],
    "max_agent_timeout_sec": 100.0,
    "max_test_timeout_sec": 20,
    "parser_name": "pytest",
}
CLIENT = {
    "build": {"dockerfile": "Dockerfile"},
    "image": "${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}",
    "container_name": "${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}",
    "command": ["sh", "-c", "sleep infinity"],
    "environment": ["TEST_DIR=${T_BENCH_TEST_DIR}", "LEVEL=3"],
    "volumes": ["${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}"],
    "working_dir": "/app",
}


def bench_task(folder: Path, services: dict[str, object] | None = None, **task: object) -> Path:
    files = {
        "task.yaml": yaml.safe_dump({**TASK, **task}),
        "docker-compose.yaml": yaml.safe_dump({"services": services or {"client": CLIENT}}),
        "Dockerfile": "FROM debian:12\nCOPY data.txt /app/\n",
        "data.txt": "data",
        "run-tests.sh": "cd /app; pytest $TEST_DIR/test_outputs.py",
        "solution.sh": "echo hello > hello.txt",
        "tests/test_outputs.py": "def test(): pass",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_folder_of_terminal_bench(tmp_path: Path) -> None:
    convert_terminal_bench(bench_task(tmp_path / "old"), tmp_path / "new")
    task = load_task_folder(tmp_path / "new")
    (step,) = task.steps
    assert (task.instruction, step.timeout_s, step.grading.timeout_s) == ("Write hello.\n", 100, 20)
    assert task.is_forgeable
    assert task.config.metadata["difficulty"] == "easy"
    assert task.config.metadata["tags"] == ["files"]
    assert (task.config.environment.env, task.config.environment.workdir) == ({"LEVEL": "3"}, "/app")
    assert sorted(path.name for path in task.context.iterdir()) == ["Dockerfile", "data.txt"]
    assert sorted(path.name for path in (task.path / "tests").iterdir()) == [
        "run-tests.sh",
        "test.sh",
        "test_outputs.py",
    ]
    assert (task.path / "solution" / "solve.sh").read_text() == "echo hello > hello.txt"


def test_services_of_terminal_bench(tmp_path: Path) -> None:
    database = {"image": "postgres:16", "container_name": "x", "volumes": ["${T_BENCH_TASK_LOGS_PATH}:/a"]}
    services: dict[str, object] = {"client": {**CLIENT, "depends_on": ["db"]}, "db": database}
    convert_terminal_bench(bench_task(tmp_path / "old", services), tmp_path / "new")
    compose = yaml.safe_load((tmp_path / "new" / "environment" / "docker-compose.yaml").read_text())
    assert compose == {"services": {"main": {"depends_on": ["db"]}, "db": {"image": "postgres:16"}}}


def test_what_cannot_be_converted_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = bench_task(tmp_path / "old", instruction=" ")
    with pytest.raises(ConfigError, match=r"task\.yaml: instruction is missing"):
        convert_terminal_bench(source, tmp_path / "new")
    source = bench_task(tmp_path / "old")
    (source / "solution.yaml").write_text("[]")
    with pytest.raises(ConfigError, match=r"solution\.yaml: keys that are typed cannot be converted"):
        convert_terminal_bench(source, tmp_path / "new")
    (source / "solution.yaml").unlink()
    (source / "run-tests.sh").unlink()
    with pytest.raises(ConfigError, match=r"run-tests\.sh: there is no such file"):
        convert_terminal_bench(source, tmp_path / "new")
    with pytest.raises(ConfigError, match="is no folder of the task"):
        convert_terminal_bench(bench_task(tmp_path / "old", {"client": {"build": ".."}}), tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        convert_terminal_bench(bench_task(tmp_path / "old"), tmp_path / "new")


def git(folder: Path, *words: str) -> str:
    environ = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "HOME": str(folder.parent),
        "PATH": "/usr/bin:/bin",
    }
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environ).stdout


def swe_row(repository: Path) -> dict[str, object]:
    """Make a small repository and its row; the repository stays at the base commit."""
    (repository / "tests").mkdir(parents=True)
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repository / "tests" / "test_calc.py").write_text("def test_old():\n    assert True\n")
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "base")
    commit = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    added = (
        "from calc import add\n\n\ndef test_old():\n    assert True\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    (repository / "tests" / "test_calc.py").write_text(added)
    test_patch = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    return {
        "instance_id": "owner__calc-1",
        "repo": "owner/calc",
        "base_commit": commit,
        "problem_statement": "add subtracts.",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_old"],
    }


PATHS = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": "."}


def grade(task: Path, repository: Path, logs: Path) -> str:
    """Run the converted script here, with this machine's folders in place of the container's."""
    script = (task / "tests" / "test.sh").read_text()
    folders = {REPOSITORY: repository, "/tests": task / "tests", "/logs": logs, "/tmp": logs}
    script = re.sub(rf"({'|'.join(folders)})\b", lambda match: str(folders[match[0]]), script)
    check = task / "tests" / "check.py"
    check.write_text(check.read_text().replace('open("/tests/', f'open("{task}/tests/'))
    subprocess.run(["bash", "-c", script], check=True, capture_output=True, env={"HOME": str(logs), **PATHS})
    return (logs / "verifier" / "reward.txt").read_text().strip()


@pytest.mark.long
def test_tests_of_a_swe_row_pass_with_its_patch_alone(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    row = swe_row(repository)
    convert_swe_row(row, "rows, line 1", tmp_path / "task")
    for name, diff, reward in (("none", "", "0"), ("bad", "no diff", "0"), ("right", str(row["patch"]), "1")):
        logs = tmp_path / name
        (logs / "artifacts").mkdir(parents=True)
        (logs / "artifacts" / "agent.diff").write_text(diff)
        assert grade(tmp_path / "task", repository, logs) == reward
        git(repository, "checkout", "-q", ".")


def test_a_swe_row_is_a_task_graded_in_another_container(tmp_path: Path) -> None:
    row = swe_row(tmp_path / "repository")
    convert_swe_row(row, "rows, line 1", tmp_path / "task")
    task = load_task_folder(tmp_path / "task")
    (step,) = task.steps
    assert (task.instruction, step.grading.is_separate) == ("add subtracts.\n", True)
    image = "swebench/sweb.eval.x86_64.owner_1776_calc-1:latest"
    assert (task.config.environment.docker_image, task.config.environment.workdir) == (image, "/testbed")
    assert str(row["base_commit"]) in step.grading.collect[0].command
    assert task.config.metadata["repo"] == "owner/calc"
    script = (task.path / "tests" / "test.sh").read_text()
    assert f"git checkout --quiet {row['base_commit']} -- 'tests/test_calc.py'" in script
    assert "python -m pytest -rA --tb=no -p no:cacheprovider 'tests/test_calc.py'" in script


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("problem_statement", "", "'problem_statement' is missing or no text"),
        ("base_commit", "main; rm", "'base_commit' is 'main; rm', and no commit"),
        ("FAIL_TO_PASS", "no json", "'FAIL_TO_PASS' must be a list of tests"),
        ("FAIL_TO_PASS", ["test_a (suite)"], "has tests that are not pytest's, and there is no column 'test_command'"),
        ("test_command", 3, "'test_command' must be a shell command"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, column: str, value: object, message: str) -> None:
    row = {"instance_id": "a", "repo": "b/a", "base_commit": "abcdef", "problem_statement": "c", "patch": "", "test_patch": "d",
           "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": [], column: value}  # fmt: skip
    with pytest.raises(ConfigError) as error:
        convert_swe_row(row, "rows.jsonl, line 1", tmp_path / "task")
    assert str(error.value).startswith("rows.jsonl, line 1: ")
    assert message in str(error.value)
    assert not list(tmp_path.iterdir())


def test_data_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_task(tmp_path / "bench" / "a")
    bench_task(tmp_path / "bench" / "b", instruction="")
    assert main(["data", "convert", str(tmp_path / "bench"), str(tmp_path / "out")]) != 0
    captured = capsys.readouterr()
    assert "b/task.yaml: instruction is missing" in captured.out
    assert "1 of 2 tasks cannot be converted" in captured.out + captured.err
    assert load_task_folder(tmp_path / "out" / "a").instruction == "Write hello.\n"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(swe_row(tmp_path / "repository")) + "\n")
    assert main(["data", "convert", str(rows), str(tmp_path / "swe")]) == 0
    assert "1 tasks in" in capsys.readouterr().out
    assert load_task_folder(tmp_path / "swe" / "owner__calc-1").config.metadata["repo"] == "owner/calc"
