"""Folders of container tasks as data: prompts, ids and metadata of the tasks, and what ``agentrl data show`` prints."""

from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.tasks import DataConfig
from agentrl.containers.task_folder import FOLDER_KEY
from agentrl.core.errors import ConfigError
from agentrl.core.types import Message
from agentrl.data.file_tasks import FileTasks, read_tasks


def write_task(folder: Path, toml: str = "", instruction: str = "Do it.\n") -> Path:
    for name, text in {
        "task.toml": f"[environment]\ndocker_image = 'work:1'\n{toml}",
        "instruction.md": instruction,
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_each_folder_is_a_task(tmp_path: Path) -> None:
    write_task(tmp_path / "b")
    write_task(tmp_path / "a", "[metadata]\nlevel = 2\nday = 2026-11-26", "# canary 17\n\nMend it.\n")
    first, second = read_tasks(tmp_path, DataConfig())
    assert (first.id, second.id) == ("a", "b")
    assert first.prompt == (Message("user", "Mend it."),)
    assert {**first.metadata, "checksum": ""} == {
        "level": 2,
        "day": "2026-11-26",
        FOLDER_KEY: str(tmp_path / "a"),
        "checksum": "",
    }
    assert read_tasks(tmp_path / "a", DataConfig()) == [first]


def test_the_checksum_is_that_of_all_files(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "a")
    checksums = {read_tasks(folder, DataConfig())[0].metadata["checksum"]}
    (folder / "tests" / "test.sh").write_text("exit 1\n")
    checksums.add(read_tasks(folder, DataConfig())[0].metadata["checksum"])
    (folder / "tests" / "test.sh").chmod(0o755)
    checksums.add(read_tasks(folder, DataConfig())[0].metadata["checksum"])
    assert len(checksums) == 3


def test_splits_and_limits_are_those_of_files(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path / "train" / name)
    write_task(tmp_path / "eval" / "z")
    data = DataConfig(path=tmp_path / "train", eval_path=tmp_path / "eval", limit=2)
    tasks = FileTasks(data)
    assert [task.id for task in tasks.split("train")] == ["a", "b"]
    assert [task.id for task in tasks.split("eval")] == ["z"]
    stream = FileTasks(DataConfig(path=tmp_path / "train", streaming=True)).stream
    assert stream is not None
    assert (stream.size, [task.id for task in stream.sample(9)]) == (3, ["a", "b", "c"])


def test_a_bad_field_is_named_with_its_folder(tmp_path: Path) -> None:
    write_task(tmp_path / "a")
    write_task(tmp_path / "b", "colour = 3")
    with pytest.raises(ConfigError, match=r"b/task\.toml: unknown key 'environment\.colour'"):
        read_tasks(tmp_path, DataConfig())


def test_data_show_prints_what_a_task_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "a", "cpus = 2\nnetwork_mode = 'no-network'\n[verifier]\nenvironment_mode = 'separate'")
    write_task(tmp_path / "b", "[verifier]\nenvironment_mode = 'shared'")
    assert main(["data", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for line in (
        f"{tmp_path / 'a'}: task a",
        "container work:1",
        "network   no-network",
        "limits    cpus 2",
        "tests     in another container",
        "user: Do it.",
        "tests     in the agent's container, which can forge the reward",
        "tasks        2\n",
        "forgeable    1 tasks, whose tests run in the agent's container",
    ):
        assert line in shown


def test_data_show_names_every_folder_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "a", "colour = 3")
    write_task(tmp_path / "b", instruction="")
    write_task(tmp_path / "c")
    assert main(["data", "show", str(tmp_path)]) != 0
    captured = capsys.readouterr()
    assert "a/task.toml: unknown key 'environment.colour'" in captured.out
    assert "b/instruction.md is empty" in captured.out
    assert "2 of 3 rows" in captured.out + captured.err
