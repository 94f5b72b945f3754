"""Trials in separate processes, each a training run: started once, and used again while only hot settings change.

Its engines stay for the next run, if that has the same (``sampler.keep_minutes``).
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from agentrl.config.layers import save_config
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import TrialError
from agentrl.inference.launch.kept_engines import end_engines_below
from agentrl.obs.step_times import StepTimes
from agentrl.tune.measurement import Measurement
from agentrl.tune.trial_process import HotSettings, Reply, TrialRequest

_POLL_S = 0.2
_END_S = 60.0
"""How long a run may take to end its engines and learner."""
_KILL_S = 10.0


class TrialProcesses:
    """Runs trials, one at a time; a context manager that ends the last one's processes and all engines.

    Args:
        folder: gets a folder for each run. At the end those of runs that failed stay.
        steps: measured steps of a trial.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self._steps = steps
        self._count = 0
        self._process: TrialProcess | None = None
        self._engine_keys: Tree = {}
        """Keys on which the engines of the last run depend."""
        self._whole: list[Path] = []
        """Folders of runs that did not fail."""

    def run(self, config: Config, limit_s: float, *, fresh: bool = False) -> Measurement:
        """Measure steps of a configuration; see `agentrl.tune.search.TrialRunner`.

        Raises:
            TrialError: the run failed, or took longer than ``limit_s``; its folder stays.
        """
        deadline, start_s, settings = time.monotonic() + limit_s, 0.0, HotSettings.from_config(config)
        keys = settings.other_keys(config)
        if self._process is not None and (fresh or self._process.keys != keys):
            self._close()
        try:
            if self._process is None:
                began = time.monotonic()
                self._process = self._start(config, keys)
                self._process.receive(deadline)
                start_s = time.monotonic() - began
            unmeasured = 1 + config.asynchronous.max_staleness
            self._process.connection.send(TrialRequest(settings, self._steps, unmeasured))
            replies = [self._process.receive(deadline) for _ in range(self._steps)]
        except TrialError:
            self._kill()
            raise
        return Measurement([reply for reply in replies if reply is not None], start_s)

    def _start(self, config: Config, keys: Tree) -> TrialProcess:
        engine_keys = {
            "sampler": keys["sampler"], "placement": keys["placement"], "learner.ranks": config.learner.ranks
        }  # fmt: skip
        if engine_keys != self._engine_keys:
            end_engines_below(self._folder)  # they could hold memory of GPUs that the learner gets
        self._engine_keys = engine_keys
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        folder.mkdir(parents=True)
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
        save_config(config, folder)
        near, far = multiprocessing.Pipe()
        command = [sys.executable, "-m", "agentrl.tune.trial_process", str(folder), str(far.fileno())]
        log = folder / "trial.log"
        with far:
            child = ChildProcess.start(command, log=log, name="the trial", error=TrialError, pass_fds=[far.fileno()])
        return TrialProcess(child, near, keys, folder)

    def _close(self) -> None:
        """Let the running trial's processes end."""
        if self._process is not None:
            self._process.wait_ended()
            self._whole.append(self._process.folder)
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End all processes, and delete the folders of runs that did not fail."""
        if self._process is not None:
            self._whole.append(self._process.folder)
        self._kill()
        end_engines_below(self._folder)
        for folder in self._whole:
            shutil.rmtree(folder)


class TrialProcess:
    """A run that takes steps on request."""

    def __init__(self, child: ChildProcess, connection: Connection, keys: Tree, folder: Path) -> None:
        self.connection = connection
        self.keys = keys
        """Keys of its configuration, without hot settings."""
        self.folder = folder
        self.child = child

    def receive(self, deadline: float) -> StepTimes | None:
        """Wait for a measured step, or for the start, which is None.

        Raises:
            TrialError: the run has failed, or the time is over.
        """
        while not self.connection.poll(_POLL_S):
            if time.monotonic() > deadline:
                raise TrialError(f"it took too long; its log is {self.child.log}")
            self.child.check()
        try:
            reply: Reply = self.connection.recv()
        except (EOFError, ConnectionError):
            self.child.wait_ended(_KILL_S)
            self.child.check()
            raise TrialError(f"it closed its connection; its log is {self.child.log}") from None
        if isinstance(reply, str):
            raise TrialError(f"{reply}. Its log is {self.child.log}")
        return reply

    def wait_ended(self) -> None:
        """Have the run end itself, and wait for it."""
        with suppress(OSError):
            self.connection.send(None)
        self.child.wait_ended(_END_S)

    def kill(self) -> None:
        """Interrupt the run, and kill it if it does not end."""
        self.connection.close()
        self.child.stop(_KILL_S)
