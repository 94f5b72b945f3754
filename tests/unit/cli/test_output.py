"""Output to a pipe, by commands in separate processes: no line is wrapped."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import preloaded

from agentrl.core.registry import ENVS, MODELS, env_class, model_folder, names

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "COLUMNS"}


def piped(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a fork of a process that has imported everything, with a pipe for its output and one for errors."""
    pipes = {number: os.pipe() for number in (1, 2)}
    files = {number: write_end for number, (_, write_end) in pipes.items()}
    process = preloaded.Forked(preloaded.Request("agentrl.cli.main:main", words, os.getcwd(), ENVIRONMENT, files))
    texts = []
    for read_end, write_end in pipes.values():
        os.close(write_end)
        with open(read_end) as file:  # what these commands print fits a pipe: neither end waits for the other
            texts.append(file.read())
    return subprocess.CompletedProcess(words, process.wait(60), *texts)


def test_a_listed_model_is_one_line() -> None:
    """In an interpreter that a user starts."""
    command = [sys.executable, "-m", "agentrl.cli.main", "models", "list"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True)
    listed = done.stdout.splitlines()
    assert listed == [f"{name}  {model_folder(name)}" for name in names(MODELS)]


def test_a_row_of_a_table_is_one_line() -> None:
    lines = piped("env", "list").stdout.splitlines()
    for name in sorted(point.name for point in entry_points(group=ENVS)):
        about = (env_class(name).__doc__ or "").strip().split("\n")[0]
        assert any(name in line and about in line for line in lines), name


def test_an_error_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / ("a long name " * 15)
    refused = piped("train", "--env", "search_r1", f"data.path={path}", "tasks.name=multihop")
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert str(path) in line
    assert line.endswith("set tasks.name=null")


def test_a_reader_that_closes_the_pipe_ends_the_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "list"]
    ended = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_command_without_standard_output_does_its_work(tmp_path: Path) -> None:
    """As of a service that closes it."""
    command = f"{sys.executable} -m agentrl.cli.main init coins >&-"
    ended = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "coins" / "config.yaml").is_file()
