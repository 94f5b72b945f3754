"""The command line as a user types it; nothing here starts a server."""

import errno
import os
import runpy
import threading
from pathlib import Path

import pytest
import yaml

from agentrl.cli.main import COMMANDS, main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_package_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["agentrl", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("agentrl", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("agentrl ")


def test_dry_run_prints_a_configuration_that_loads(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "train", "--env", "search_r1", "--dry-run", "train.steps=7", "learner.device=cuda")
    assert status == 0
    assert "GiB on each of 1 learner ranks (cuda): weights" in err
    assert yaml.safe_load(out)["train"]["steps"] == 7
    assert yaml.safe_load(out)["tasks"]["name"] == "multihop", "the shipped cpu configuration is taken"
    assert "search_r1" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "--env", "serch_r1"), "'search_r1'"),
        (("train", "--env", "nothing.py:Env"), "nothing.py"),
        (("train", "rollout.bacth_size=3"), "rollout.batch_size"),
        (("train", "model.path=/no/such/model"), "model.path"),
        (("train", "env.options={topkk: 2}"), "env.options"),
        (("train", "tasks.name=multihopp"), "multihop"),
        (("train", "sampler.top_p=0.5"), "sampler.allow_unnormalised"),
        (("train", "--config", "none.yaml"), "none.yaml"),
        (("train", "rollout.max_tokens=100000"), "sampler.embedded.context"),
        (("train", "eval.size=100000000"), "eval.size"),
        (("train", "sampler.backend=sglang"), "sampler.backend"),
        (("train", "batch.global_batch_size=100"), "batch.global_batch_size=96"),
        (("train", "--replay", "none.jsonl"), "none.jsonl"),
        (("rollout", "--out", "samples.txt"), ".parquet"),
        (("rollout", "--out", "samples.jsonl", "--tasks", "0"), "--tasks 0: at least 1"),
        (("env", "check", "nope"), "search_r1"),
        (("env", "check", "search_r1", "topkk=2"), "topk"),
        (("env", "check", "search_r1", "topk"), "key=value"),
        (("eval", "--checkpoint", "."), "--checkpoint"),
        (
            ("eval", "--checkpoint", "multihop-warm", "model.path=other"),
            "--checkpoint multihop-warm with model.path=other",
        ),
        (("gateway", "--model", "multihop-warm", "model.path=other"), "--model multihop-warm with model.path=other"),
        (("plan", "--model", "multihop-warm", "model.path=other"), "--model multihop-warm with model.path=other"),
        (("eval", "--json", "."), ". is a folder"),
        (("eval", "--json", os.devnull), f"{os.devnull} is a folder or a device"),
        (("export", ".", "out"), "agentrl export .: neither a model"),
        (("gateway", "--model", "."), "--model .: neither a model"),
        (("gateway", "--model", "multihop-warm", "sampler=large"), "sampler='large'"),
        (("gateway", "--model", "multihop-warm", "sampler.embedded.context=large"), "sampler.embedded.context='large'"),
        (("tune", "--env", "search_r1", "--minutes", "nan"), "--minutes nan"),
        (("tune", "--env", "search_r1", "--out", "none/tuned.yaml"), "there is no folder none"),
        (("launch", "slurm", "--env", "search_r1", "--dry-run", "--out", "."), "--out . cannot be written"),
        (("sft", "--resume", "run.dir=run"), "run is a run of agentrl train"),
        (("view", "--serve", "run", "--port", "99999"), "(--port, --host;"),
        (("models", "get", "smollm2-135m", "--out", "notes.txt"), "--out notes.txt: notes.txt is a file"),
        (("data", "convert", "empty.jsonl", "out", "--limit", "0"), "--limit 0: at least 1"),
        (("data", "show", "empty.jsonl", "--rows", "-1"), "--rows -1: at least 0"),
        (("audit", "empty.jsonl"), "empty.jsonl has no rollouts"),
        (("check", "empty.jsonl", "reward=mine.py:score"), "empty.jsonl has no rollouts"),
        (("view", "empty.jsonl", "--html"), "empty.jsonl has no rollouts"),
        (("view", "empty.jsonl"), "empty.jsonl has no rollouts"),
        (("view", "notes.txt"), "no file of rollouts"),
    ],
)
def test_mistakes_exit_with_two_and_name_the_key(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty.jsonl", "notes.txt"):
        Path(name).touch()
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/config.yaml").touch()
    status, _, err = run(capsys, *words)
    assert status == 2
    assert message in err


def test_settings_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "train", "train.steps=7", "--env", "search_r1", "run.seed=3", "--dry-run")
    assert status == 0
    assert (yaml.safe_load(out)["train"]["steps"], yaml.safe_load(out)["run"]["seed"]) == (7, 3)
    with pytest.raises(SystemExit) as stop:
        main(("train", "--no-such-option"))
    assert stop.value.code == 2


def test_env_list_and_check(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "env", "list")
    assert status == 0
    assert "search_r1" in out
    assert run(capsys, "env", "check", "search_r1")[0] == 0


def test_env_check_builds_with_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cli_env.py").write_text(
        "from agentrl import Env\n"
        "class Board(Env):\n"
        "    def __init__(self, size, color='red'):\n"
        "        self.size = len(size['rows'])\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.left = self.size\n"
        "        return super().reset(seed=seed, options=options)\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        return self.task.prompt, float(self.left), not self.left, False, {}\n"
    )
    name = f"{tmp_path}/cli_env.py:Board"
    status, _, err = run(capsys, "env", "check", name)
    assert status == 2
    assert "missing a required argument: 'size'; Board takes: size, color" in err
    status, _, err = run(capsys, "env", "check", name, "size.rows=3")
    assert status == 2
    assert "constructor raised TypeError: object of type 'int' has no len() (cli_env.py:4)" in err
    status, out, err = run(capsys, "env", "check", name, "size.rows=[1, 2, 3]", "color=blue")
    assert status == 0, err
    assert "passes" in out
    assert "note: Board keeps a state" in out


def test_resume_without_a_run_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "train", "--resume")
    assert status == 2
    assert "run.dir" in err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main((command, "--help"))
        assert stop.value.code == 0


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr("agentrl.cli.train.run", full)
    assert main(["train"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "run/metrics.jsonl: No space left on device" in line


def test_a_path_that_cannot_be_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    for words, message in (
        (("init", "notes.txt/coins"), "notes.txt/coins: Not a directory"),
        (("doctor", "a" * 300), "File name too long"),
    ):
        assert main(words) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert message in line


def test_a_changed_working_directory_is_why_a_file_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def change_folder(arguments: object) -> None:
        os.chdir("/")
        Path("runs/first/metrics.jsonl").read_text()

    monkeypatch.setattr("agentrl.cli.train.run", change_folder)
    assert main(["train"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert f"the working directory was {tmp_path}, and code of yours has changed it to /" in line


def test_threads_that_the_process_waits_for_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = threading.Event()
    monkeypatch.setattr("agentrl.cli.train.run", lambda arguments: threading.Thread(target=end.wait).start())
    monkeypatch.setattr("agentrl.cli.main.is_library", lambda file: not file.endswith("threading.py"))
    try:
        assert main(["train"]) == 0
    finally:
        end.set()
    assert "waiting for 1 threads that your code has started, at " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--rollout-batch-size 32", "settings are key=value: rollout.batch_size=32"),
        ("--rollout-batch-size=32", "settings are key=value: rollout.batch_size=32"),
        ("--rollout_batch_size 32", "settings are key=value: rollout.batch_size=32"),
        ("--train.steps 5", "settings are key=value: train.steps=5"),
        ("--algo-kl-coef --resume", "settings are key=value: algo.kl_coef=…"),
        ("--learner-optimizer-lr 1e-5", "settings are key=value: learner.optimizer.lr=1e-5"),
        ("--num-rollout 5", "settings are key=value"),
    ],
)
def test_an_option_that_is_a_setting_is_told_how_settings_are_written(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", *words.split()])
    assert end.value.code == 2
    assert hint in capsys.readouterr().err


def test_an_interrupt_names_the_code_that_it_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By Ctrl-C, or raised by the code, which cannot be told apart."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("\nraise KeyboardInterrupt\n")
    assert main(["env", "check", "mine.py:Mine"]) == 1
    assert f"interrupted at {tmp_path / 'mine.py'}:2, by Ctrl-C or" in capsys.readouterr().err
