"""Starts the command line as a user would, in a fresh directory, and ends what it started."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from agentrl.cli.main import main

SMALL = ["rollout.batch_size=16", "eval.size=48", "obs.progress=plain", "obs.tensorboard=false"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}


def agentrl(*words: str, cwd: Path, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Do the same in this process, which has imported everything: for what only reads files, or is refused."""
    out, errors, columns = io.StringIO(), io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = environment()["COLUMNS"]
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(words)
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


class Running:
    """A run in the background, in a process group of its own."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self._log = (cwd / "output.txt").open("a+")
        self.process = subprocess.Popen(
            command(*words),
            cwd=cwd,
            env=environment(),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 180) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, timeout: float = 240) -> int:
        return self.process.wait(timeout)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


def gone(processes: list[psutil.Process], timeout: float = 30) -> list[psutil.Process]:
    """Wait for processes to end and return those that have not.

    Ray's two agents are left out: after a kill of their driver they end by themselves, but only after a minute.
    """
    agents = {process.pid for process in processes if _is_ray_agent(process)}
    _, alive = psutil.wait_procs([process for process in processes if process.pid not in agents], timeout=timeout)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _is_ray_agent(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("Agent") for word in process.cmdline()[:1])
    except psutil.Error:
        return False


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
