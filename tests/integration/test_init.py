"""`agentrl init` as its first user meets it: the project's own tests pass, and it trains at once."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import preloaded
import pytest
from shared_runs import Services, agentrl, environment, here, metrics

from agentrl.cli.main import _parse, build_parser
from agentrl.project_template import template_files


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("init")
    done = agentrl("init", "first-steps", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    for command in (
        "cd first-steps",
        "agentrl train --config config.yaml",
        "pip install -e '.[test]'",
        "python -m pytest",
    ):
        assert f"  {command}\n" in done.stdout
    return cwd / "first-steps"


def test_every_file_is_there_with_the_projects_name(project: Path) -> None:
    written = sorted(path.relative_to(project) for path in project.rglob("*") if path.is_file())
    assert written == sorted(Path(str(path).replace("my_package", "first_steps")) for path in template_files())
    texts = [(project / path).read_text() for path in written]
    assert not any(name in text for text in texts for name in ("my_project", "my_package"))
    assert (project / "README.md").read_text().startswith("# first-steps\n")
    assert 'name = "first-steps"' in (project / "pyproject.toml").read_text()


def test_its_own_tests_pass(project: Path) -> None:
    """In a process that has imported agentrl, as `python -m pytest` would."""
    words = ["-q", "-p", "no:cacheprovider"]
    done = preloaded.run("pytest:main", words, cwd=project, env={**environment(), "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_it_needs_what_its_readme_uses_and_installs_as_a_wheel_with_its_code(project: Path, tmp_path: Path) -> None:
    needs = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert needs["dependencies"] == ["agentrl-framework"]
    assert any(need.startswith("pytest") for need in needs["optional-dependencies"]["test"])
    copy = shutil.copytree(project, tmp_path / "copy")  # a build leaves files
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("first_steps-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file_names = set(archive.namelist())
        assert {f"first_steps/{name}.py" for name in ("__init__", "env", "tasks", "tools")} <= file_names
        points = archive.read(next(name for name in file_names if name.endswith("/entry_points.txt"))).decode()
    assert "[agentrl.envs]\nfirst-steps = first_steps.env:DirectoryEnv" in points
    assert "[agentrl.tasks]\nfirst-steps = first_steps.tasks:People" in points


def test_commands_of_its_readme_are_parsed(project: Path) -> None:
    block = "\n".join(re.findall(r"^```\n(.*?)^```", (project / "README.md").read_text(), re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^agentrl (.+)$", block, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line, comments=True)
        _parse(build_parser(words[0]), words)


def test_its_environment_passes_the_check(project: Path) -> None:
    done = agentrl("env", "check", "first_steps.env:DirectoryEnv", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "passes" in done.stdout


@pytest.mark.long
def test_it_trains(project: Path, services: Services) -> None:
    small = ["train.steps=2", "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "eval.size=8"]
    words = ["--config", "config.yaml", "run.dir=run", *small, "obs.tensorboard=false"]
    done = services.agentrl("train", *words, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(project / "run") if "train/reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["rollout/right"] <= 1 and row["rollout/lookups"] > 0 for row in rows)


def test_from_elsewhere_the_error_says_where_was_looked(project: Path) -> None:
    done = here("train", "--config", "first-steps/config.yaml", "--dry-run", cwd=project.parent)
    assert done.returncode == 2
    assert "env.name=first_steps.env:DirectoryEnv: there is no module 'first_steps'" in done.stderr
    assert f"in {project.parent}" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("2fast", "starts with a letter"), ("my project", "no name"), ("Json", "a module 'json'"), ("class", "a module")],
)
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    done = here("init", name, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "env.py").write_text("mine")
    (tmp_path / "file").write_text("a file")
    for name, message in (("mine", "not empty"), ("file", "is a file")):
        done = here("init", name, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
    assert (tmp_path / "mine" / "env.py").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert here("init", "empty", cwd=tmp_path).returncode == 0
