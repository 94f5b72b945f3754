"""Folders of tasks: files, steps with their settings, and what is refused."""

import shutil
from pathlib import Path

import pytest

from agentrl.containers.task_folder import TaskFolder, find_task_folders, json_metadata, load_task_folder, strip_canary
from agentrl.containers.task_toml import NetworkPolicy
from agentrl.core.errors import ConfigError


def write(folder: Path, **files: str) -> Path:
    """Write files; ``__`` in a name is a slash, and the last ``_`` a dot."""
    for name, text in files.items():
        path = folder / ".".join(name.replace("__", "/").rsplit("_", 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def small_task(folder: Path, toml: str = "", **files: str) -> Path:
    """Write a task of one step."""
    write(folder, task_toml=toml, instruction_md="Do it.\n", tests__test_sh="exit 0\n", **files)
    (folder / "environment").mkdir(exist_ok=True)
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    return folder


def stepped_task(folder: Path) -> TaskFolder:
    shutil.copy(Path(__file__).with_name("every_field.toml"), write(folder, x_txt="") / "task.toml")
    write(folder, tests__helper_py="", tests__test_sh="shared", solution__solve_sh="all")
    write(folder, steps__first__instruction_md="First.", steps__first__workdir__setup_sh="touch a")
    write(folder, steps__second__instruction_md="Second.", steps__second__tests__test_sh="own")
    write(folder, steps__second__solution__solve_sh="second")
    return load_task_folder(folder)


def test_a_task_of_one_step(tmp_path: Path) -> None:
    task = load_task_folder(small_task(tmp_path / "small", "[agent]\ntimeout_sec = 5"))
    (step,) = task.steps
    assert (task.name, task.instruction, step.name, step.timeout_s) == ("small", "Do it.\n", "", 5)
    assert (step.files, step.solution, step.min_rewards) == (None, None, {})
    assert step.grading.is_separate  # unless a task says that they share the agent's
    assert not task.is_forgeable
    assert not task.has_compose
    assert step.grading.tests == (tmp_path / "small" / "tests",)
    assert step.grading.context == task.context == tmp_path / "small" / "environment"
    assert [artifact.source for artifact in step.grading.artifacts] == ["/logs/artifacts"]


def test_steps_have_their_own_settings_and_else_those_of_the_task(tmp_path: Path) -> None:
    task = stepped_task(tmp_path / "all")
    first, second = task.steps
    assert task.name == "agentrl/every-field"
    assert (first.instruction, first.timeout_s, first.user) == ("First.", 60, "other")
    assert (second.instruction, second.timeout_s, second.user) == ("Second.", 120.5, "agent")
    assert first.network == NetworkPolicy("no-network")
    assert second.network.allowed_hosts[0] == "example.org"
    assert (first.files, second.files) == (tmp_path / "all" / "steps" / "first" / "workdir", None)
    assert first.solution == tmp_path / "all" / "solution"
    assert second.solution == tmp_path / "all" / "steps" / "second" / "solution"
    assert first.healthcheck is not None
    assert (first.min_rewards, second.min_rewards) == ({"reward": 0.5}, {"style": 0.25})
    assert first.allows_next({"reward": 0.5})
    assert not first.allows_next({"reward": 0.4})
    assert not second.allows_next({"reward": 1})
    shared, separate = first.grading, second.grading
    assert (shared.is_separate, separate.is_separate, task.is_forgeable) == (False, True, True)
    assert (shared.timeout_s, separate.timeout_s) == (30, 90)
    assert (shared.env, separate.env) == ({"MODE": "loose"}, {"MODE": "strict"})
    assert shared.environment.docker_image == "work:1"
    assert shared.tests == (tmp_path / "all" / "tests",)
    # The image of [verifier.environment] has the tests.
    assert (separate.environment.docker_image, separate.tests, separate.user) == ("grader:1", (), "1000")
    assert separate.network == NetworkPolicy("no-network")
    assert [artifact.source for artifact in shared.artifacts][-1] == "/work/first"
    assert [hook.service for hook in separate.collect] == ["db"]


def test_the_reward_of_steps_is_their_mean_or_the_last(tmp_path: Path) -> None:
    task = stepped_task(tmp_path / "all")
    assert task.reward([{"reward": 1.0}, {"style": 0.5}]) == {"style": 0.5}
    mean = load_task_folder(small_task(tmp_path / "small"))
    assert mean.reward([{"reward": 1.0}, {"reward": 0.0, "style": 0.5}]) == {"reward": 0.5, "style": 0.25}


def test_tests_in_a_container_of_their_own(tmp_path: Path) -> None:
    copy = load_task_folder(small_task(tmp_path / "copy", "[verifier]\nenvironment_mode = 'separate'")).steps[0].grading
    assert (copy.is_separate, copy.context) == (True, tmp_path / "copy" / "environment")
    assert copy.tests == (tmp_path / "copy" / "tests",)
    built = small_task(
        tmp_path / "built", "[verifier]\nenvironment_mode = 'separate'\n[environment]\ndocker_image = 'a'"
    )
    (built / "tests" / "Dockerfile").write_text("FROM scratch\n")
    grading = load_task_folder(built).steps[0].grading
    assert (grading.environment.docker_image, grading.context, grading.tests) == (None, built / "tests", ())
    other = small_task(tmp_path / "other", "[environment]\ndocker_image = 'a'\n[verifier.environment]\nmemory_mb = 9")
    grading = load_task_folder(other).steps[0].grading
    assert (grading.environment.docker_image, grading.environment.memory_mb) == ("a", 9)
    assert grading.tests == (other / "tests",)


def test_canaries_are_not_shown() -> None:
    text = "<!-- benchmark data; canary GUID 1 -->\n# Canary: 2\n\nFix # canary.\n"
    assert strip_canary(text) == "Fix # canary.\n"
    assert strip_canary("# Title\ncanary") == "# Title\ncanary"


def test_folders_of_tasks(tmp_path: Path) -> None:
    small_task(tmp_path / "b")
    small_task(tmp_path / "a")
    (tmp_path / "notes").mkdir()
    assert find_task_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert find_task_folders(tmp_path / "a") == [tmp_path / "a"]
    assert find_task_folders(tmp_path / "notes") == find_task_folders(tmp_path / "none") == []


def test_dates_of_the_metadata_are_text(tmp_path: Path) -> None:
    metadata = stepped_task(tmp_path / "all").config.metadata
    assert json_metadata({**metadata, "more": [metadata]}) == {
        "difficulty": "easy",
        "made": "2026-11-26",
        "more": [{"difficulty": "easy", "made": "2026-11-26"}],
    }


@pytest.mark.parametrize(
    ("toml", "gone", "message"),
    [
        ("", "task.toml", "is no folder of a task: it has no task.toml"),
        ("a =", "", "task.toml is not a TOML file, or is damaged"),
        ("colour = 1", "", "task.toml: unknown key 'colour'"),
        ("", "instruction.md", "instruction.md cannot be read"),
        ("", "tests/test.sh", "tests/test.sh: there is no such file"),
        ("", "environment/Dockerfile", "environment.docker_image is not set, and there is no"),
        ("[[steps]]\nname = 'a'", "", "steps/a/instruction.md cannot be read"),
    ],
)
def test_what_is_refused(tmp_path: Path, toml: str, gone: str, message: str) -> None:
    folder = small_task(tmp_path / "task", toml)
    if gone:
        (folder / gone).unlink()
    with pytest.raises(ConfigError) as error:
        load_task_folder(folder)
    assert message in str(error.value)


def test_every_bad_field_has_a_line_with_its_file(tmp_path: Path) -> None:
    folder = small_task(tmp_path / "task", "colour = 1\n[environment]\ncpus = -1")
    with pytest.raises(ConfigError) as error:
        load_task_folder(folder)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{folder / 'task.toml'}: ") for line in lines)


def test_links_out_of_a_task_and_rules_to_ignore_files_are_refused(tmp_path: Path) -> None:
    folder = small_task(tmp_path / "task")
    (folder / "tests" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="tests/secret: the link leads out of the task's folder"):
        load_task_folder(folder)
    (folder / "tests" / "secret").unlink()
    (folder / "tests" / ".harborignore").write_text("*.py\n")
    with pytest.raises(ConfigError, match="rules of files to leave out are not followed"):
        load_task_folder(folder)


def test_an_empty_instruction_and_a_solution_without_its_script_are_refused(tmp_path: Path) -> None:
    folder = small_task(tmp_path / "task", solution__notes_md="")
    with pytest.raises(ConfigError, match=r"solution has no solve\.sh"):
        load_task_folder(folder)
    (folder / "instruction.md").write_text("# canary\n\n")
    with pytest.raises(ConfigError, match=r"instruction\.md is empty"):
        load_task_folder(folder)
