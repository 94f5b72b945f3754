"""What `sandbox.readonly` must not show: tasks, environments, a run's data, and files that can be written to all the same."""

from __future__ import annotations

import asyncio
import os
import socket
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
from tests.unit.sandbox.bubblewraps import other_backend

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
    place = tmp_path / "deep" / "special"
    place.parent.mkdir()
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(place))
    elif kind == "named pipe":
        os.mkfifo(place)
    elif os.geteuid() == 0:
        os.mknod(place, 0o20666, os.makedev(1, 3))
    else:
        pytest.skip("only root can make a device")
    with pytest.raises(ConfigError, match=rf"sandbox\.readonly has {tmp_path} with the {kind} {place}"):
        check_shown(SandboxConfig(readonly=(tmp_path,)))
    place.unlink()
    check_shown(SandboxConfig(readonly=(tmp_path,)))


@pytest.mark.parametrize("key", ["data.path", "env.name", "run.dir"])
def test_files_of_a_run_are_refused_before_it_starts(tmp_path: Path, key: str) -> None:
    values = {"data.path": str(tmp_path / "train.jsonl"), "env.name": "python_math", "run.dir": str(tmp_path / "runs")}
    (tmp_path / "env.py").write_text("from agentrl_envs.python_math import PythonMathEnv as Own\n")
    tree = {"env": {"name": "python_math"}, "sandbox": {"backend": "unsafe_subprocess", "readonly": [str(tmp_path)]}}
    section, field = key.split(".")
    value = f"{tmp_path / 'env.py'}:Own" if key == "env.name" else values[key]
    with pytest.raises(ConfigError, match=rf"sandbox\.readonly has {tmp_path}, which shows the run's {key}"):
        check_tools(Config.model_validate(tree | {section: {field: value}}))


def test_tasks_among_the_machines_programs_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are if agentrl is installed for the whole machine. A folder and a file of the machine stand for them."""
    folder, file = Path("/usr/share"), Path("/usr/bin/env")
    monkeypatch.setattr(shown_folders, "plugin_folders", lambda: {folder: "taskset 'a'", file: "taskset 'b'"})

    async def main() -> None:
        async with other_backend() as backend, await backend.open("a") as sandbox:
            with pytest.raises(OSError, match="No such file"):
                await sandbox.read_file(str(next(path for path in folder.rglob("*") if path.is_file())))
            with pytest.raises(PermissionError):  # a device of a mount without devices lies over it
                await sandbox.read_file(str(file))
            with pytest.raises(OSError, match="Read-only"):
                await sandbox.write_file(str(folder / "new"), b"")

    asyncio.run(main())
