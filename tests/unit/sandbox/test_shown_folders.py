"""What `sandbox.readonly` must not show: tasks, environments, a run's data, and files that can be written to all the same."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import agentrl_envs
import agentrl_tasks
import pytest

from agentrl.config.sandbox import SandboxConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.runtime.run_tools import check_tools
from agentrl.sandbox import shown_folders
from agentrl.sandbox.registry import make_backend
from agentrl.sandbox.shown_folders import check_shown

TASKS, ENVS = (Path(package.__path__[0]).resolve() for package in (agentrl_tasks, agentrl_envs))


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (TASKS, "taskset"),
        (TASKS / "contest", "taskset"),
        (TASKS.parent, "environment"),
        (ENVS, "environment"),
        (Path(sys.prefix), "environment"),
        (Path(sys.prefix).parent, "environment"),
    ],
    ids=["tasks", "a folder of them", "the repository", "environments", "the run's packages", "above them"],
)
@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_folders_with_tasks_are_refused(folder: Path, words: str, backend: str) -> None:
    with pytest.raises(ConfigError, match=rf"sandbox\.readonly has {folder}, which shows the .*{words}"):
        make_backend(SandboxConfig(backend=backend, readonly=(folder,)))


def test_a_link_to_them_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(TASKS)
    with pytest.raises(ConfigError, match="taskset"):
        check_shown(SandboxConfig(readonly=(tmp_path / "link",)))


def test_single_packages_of_an_environment_can_be_shown() -> None:
    (package,) = __import__("orjson").__path__
    check_shown(SandboxConfig(readonly=(Path(package),)))


@pytest.mark.parametrize("kind", ["socket", "named pipe", "device"])
def test_folders_with_files_that_can_be_written_to_are_refused(tmp_path: Path, kind: str) -> None:
    special_path = tmp_path / "deep" / "special"
    special_path.parent.mkdir()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as unix_socket:
            unix_socket.bind(str(special_path))
    elif kind == "named pipe":
        os.mkfifo(special_path)
    elif os.geteuid() == 0:
        os.mknod(special_path, 0o20666, os.makedev(1, 3))
    else:
        pytest.skip("only root can make a device")
    with pytest.raises(ConfigError, match=rf"sandbox\.readonly has {tmp_path} with the {kind} {special_path}"):
        check_shown(SandboxConfig(readonly=(tmp_path,)))
    special_path.unlink()
    check_shown(SandboxConfig(readonly=(tmp_path,)))


@pytest.mark.parametrize("key", ["data.path", "env.name", "run.dir", "reward.function"])
def test_files_of_a_run_are_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    values = {"data.path": str(tmp_path / "train.jsonl"), "env.name": "python_math", "run.dir": str(tmp_path / "runs")}
    (tmp_path / "env.py").write_text("from agentrl_envs.python_math import PythonMathEnv as Own\n")
    (tmp_path / "own_reward.py").write_text("def score(sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    values["reward.function"] = "own_reward:score"
    tree = {"env": {"name": "python_math"}, "sandbox": {"backend": "unsafe_subprocess", "readonly": [str(tmp_path)]}}
    section, field = key.split(".")
    value = f"{tmp_path / 'env.py'}:Own" if key == "env.name" else values[key]
    with pytest.raises(ConfigError, match=rf"sandbox\.readonly has {tmp_path}, which shows the run's {key}"):
        check_tools(Config.model_validate(tree | {section: {field: value}}))


@pytest.fixture(scope="module")
def machine_wide() -> dict[str, list[str]]:
    """What `installed_plugins` prints."""
    if os.geteuid() != 0 or shutil.which("bwrap") is None:
        pytest.skip("needs root, for mounts of its own, and bubblewrap")
    program = Path(__file__).with_name("installed_plugins.py")
    search_path = f"/usr/include/site-packages:/usr/include/site-packages/zipped.egg:{os.pathsep.join(sys.path)}"
    output = subprocess.check_output(
        ["unshare", "--mount", "--propagation", "private", sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": search_path},
        text=True,
    )
    return json.loads(output.splitlines()[-1])


def test_nothing_of_plugins_that_are_installed_for_the_whole_machine_can_be_read(
    machine_wide: dict[str, list[str]],
) -> None:
    """Sources, compiled files, data, dependencies, archives and editable sources of tasksets, environments, rewards and tools."""
    assert len(machine_wide["planted"]) >= 20
    assert sorted(machine_wide["read without files"]) == sorted(machine_wide["planted"]), (
        "the control reads all of them"
    )
    assert machine_wide["read"] == []


def test_the_interpreter_and_packages_that_agentrl_requires_still_work(machine_wide: dict[str, list[str]]) -> None:
    """Packages that ``sandbox.readonly`` names too."""
    assert machine_wide["imported"] == ["25 shown"]


def test_the_folders_of_an_installed_plugin_are_refused(machine_wide: dict[str, list[str]]) -> None:
    """By both backends. Only a folder whose content no plugin has installed may be shown."""
    shown = {Path(path).parent.name for path in set(machine_wide["planted"]) - set(machine_wide["refused"])}
    assert shown == {"app", "more_tasks", "answers_of_cities"}


def test_data_among_the_machines_programs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``data.path=/usr/share/train.jsonl`` would be shown by bubblewrap, and by no other backend."""
    monkeypatch.setattr(shown_folders, "SYSTEM", tmp_path)
    data = tmp_path / "share/train.jsonl"
    data.parent.mkdir()
    for backend in ("bubblewrap", "docker"):
        check_shown(SandboxConfig(backend=backend), {tmp_path / "src/train.jsonl": "run's data.path"})
    check_shown(SandboxConfig(backend="docker"), {data: "run's data.path"})
    with pytest.raises(ConfigError, match=rf"the run's data\.path \({data}\) is among the machine's programs"):
        check_shown(SandboxConfig(), {data: "run's data.path"})
