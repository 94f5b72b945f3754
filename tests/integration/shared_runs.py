"""Starts the command line as a user would, in a fresh directory, and ends what it started."""

import asyncio
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

import preloaded
import psutil

from agentrl.cli.main import main
from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.registry import make_tasks, tool_service
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess, launch_embedded
from agentrl.models.resolve import resolve_model
from agentrl.obs.progress import STEP_PHASES
from agentrl.toolserver.launch import ToolServerProcess, launch_tool

COMMAND_LINE = "agentrl.cli.main:main"
IN_PROCESS_LEARNER = "in_process_learner:main"
ONE_THREAD = ["learner.threads=1", "sampler.embedded.threads=1"]
"""The threads of a process wait for each other at every product, which takes long where others use the cores as well."""
SMALL = [*ONE_THREAD, "rollout.batch_size=16", "eval.size=48", "obs.progress=plain", "obs.tensorboard=false"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli.main", *words]


def environment() -> dict[str, str]:
    """Return this process's environment for a run in another process.

    Without COLUMNS: output that is not a terminal is not wrapped. Without RAY_AUTH_MODE: Ray sets it where it starts, and
    a preloaded process, whose Ray has read its own already, would take the token of a cluster for none.
    """
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "RAY_AUTH_MODE")}
    return {**variables, "HF_HUB_OFFLINE": "1"}


def agentrl(
    *words: str, cwd: Path, timeout: float = 240, target: str = COMMAND_LINE, forks: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, which has imported everything before it starts.

    Args:
        words: of its command line.
        cwd: where it runs.
        timeout: seconds it may take.
        target: `IN_PROCESS_LEARNER` for a run that starts engine and tool servers, and does without Ray.
        forks: its engines and tool servers have imported everything too; else they start as those of a user do.
        env: variables that are added.

    """
    return preloaded.run(target, words, cwd=cwd, env=environment() | env, timeout=timeout, forks=forks)


class Services:
    """An engine and a search server that many runs join, one after the other; started by the first that needs them.

    Runs that join them are about what a run computes and writes. How it starts, watches and ends its own processes is
    tested with runs of their own (`agentrl`, `Running`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exits = contextlib.ExitStack()
        self._engine: EngineProcess | None = None
        self._search: ToolServerProcess | None = None

    def engine(self) -> str:
        """Return the address of an idle engine with the weights of the shipped search policy, version 0."""
        model = resolve_model("multihop-warm")
        if self._engine is None:
            self._engine = launch_embedded(model, EmbeddedConfig(threads=1), log=self._folder / "engine.log")
            self._exits.callback(self._engine.stop)
        asyncio.run(_reset(self._engine, model))
        return self._engine.url

    def search(self) -> str:
        """Return the address of a search server with the documents of the taskset ``multihop``."""
        if self._search is None:
            service = tool_service("search")
            arguments = service.launch_arguments({}, make_tasks("multihop"), self._folder / "search")
            self._search = launch_tool("search", arguments, log=self._folder / "search.log")
            self._exits.callback(self._search.stop)
        return self._search.url

    def agentrl(
        self, command: str, *words: str, cwd: Path, search: bool = False, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run a command that samples with the shared engine and, with ``search``, the shared search server.

        A learner is in the run's own process.
        """
        joined = [f"sampler.url={self.engine()}", *([f"tools.search.url={self.search()}"] if search else [])]
        arguments = (command, *words, *ONE_THREAD, *joined)
        return preloaded.run(IN_PROCESS_LEARNER, arguments, cwd=cwd, env=environment(), timeout=timeout, forks=True)

    def close(self) -> None:
        """End both."""
        self._exits.close()


async def _reset(engine: EngineProcess, model: Path) -> None:
    """Have an engine that other runs used be as it was started."""
    engine.check()
    client = SGLangClient(engine.url, timeout_s=60)
    try:
        for tag in ("weights", "kv_cache"):
            await client.memory.resume(tag)
        await client.pause("abort")
        await client.updates.begin()  # ends the update in which a run was killed
        await client.updates.cancel()
        await client.resume()
        await client.updates.from_disk(model, 0)
    finally:
        await client.aclose()


def here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Do the same in this process, which has imported everything: for what only reads files, or is refused."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


class Running:
    """A run in the background, in a process group of its own.

    Args:
        words: of its command line.
        cwd: where it runs; ``output.txt`` there gets what it prints.
        target: as of `agentrl`.
        forks: as of `agentrl`.
        fresh: start an interpreter, as a user does, where the seconds and the memory of the imports matter.

    """

    def __init__(
        self, *words: str, cwd: Path, target: str = COMMAND_LINE, forks: bool = True, fresh: bool = False
    ) -> None:
        self._log = (cwd / "output.txt").open("a+")
        self.process: subprocess.Popen[bytes] | preloaded.Forked
        if fresh:
            self.process = subprocess.Popen(
                command(*words),
                cwd=cwd,
                env=environment(),
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        else:
            files = {1: self._log.fileno(), 2: self._log.fileno()}
            request = preloaded.Request(target, words, str(cwd), environment(), files, forks=forks)
            self.process = preloaded.Forked(request)

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_for(self, condition: Callable[[], bool], timeout: float = 400) -> None:
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

    def interrupt(self) -> None:
        """Press Ctrl-C, and assert that the run ends with status 1 and leaves no process."""
        children = self.descendants()
        self.send(signal.SIGINT)
        assert self.finish() == 1
        assert gone(children) == []

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._log.close()


def gone(processes: list[psutil.Process], timeout: float = 5) -> list[psutil.Process]:
    """Wait for processes to end and return those that have not."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def metrics(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assert_phases_add_up(folder: Path) -> None:
    """Assert that the phases of each step after the first are at least 98% of it, and no more than all of it."""
    rows = [row for row in metrics(folder) if "train/reward" in row][1:]
    assert rows
    for row in rows:
        phases_s = sum(row.get(f"time/{name}_s", 0.0) for name in STEP_PHASES)
        assert 0.98 * row["time/step_s"] <= phases_s <= row["time/step_s"] + 1e-6, row
