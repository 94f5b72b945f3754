"""`agentrl init` as its first user meets it: the project's own tests pass, and it trains at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared_runs import Services, agentrl, environment, here, metrics

from agentrl.project_template import template_files


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("init")
    done = agentrl("init", "first-steps", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    for command in ("cd first-steps", "agentrl train --config config.yaml", "python -m pytest"):
        assert f"  {command}\n" in done.stdout
    return cwd / "first-steps"


def test_every_file_is_there_with_the_projects_name(project: Path) -> None:
    written = sorted(path.relative_to(project) for path in project.rglob("*") if path.is_file())
    assert written == sorted(template_files())
    texts = [(project / path).read_text() for path in written]
    assert not any("my_project" in text for text in texts)
    assert (project / "README.md").read_text().startswith("# first-steps\n")
    assert 'name = "first-steps"' in (project / "pyproject.toml").read_text()


def test_its_own_tests_pass(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        env={**environment(), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_its_environment_passes_the_check(project: Path) -> None:
    done = agentrl("env", "check", "env.py:DirectoryEnv", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "passes" in done.stdout


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
    assert str(project.parent / "env.py") in done.stderr
    assert "env.name=env.py:DirectoryEnv" in done.stderr
    assert "starts in the folder where the command runs" in done.stderr


@pytest.mark.parametrize(("name", "message"), [("2fast", "starts with a letter"), ("my project", "no name")])
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
