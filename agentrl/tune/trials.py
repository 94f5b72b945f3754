"""Trials in processes of their own, each a training run: started once, and used again while only hot settings change."""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from agentrl.config.layers import save_config
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import TrialError
from agentrl.obs.step_times import StepTimes
from agentrl.tune.measurement import Measurement
from agentrl.tune.trial_process import HotSettings, Reply, TrialRequest

_POLL_S = 0.2
_END_S = 60.0
"""How long a run may take to end its engines and learner."""
_KILL_S = 10.0


class TrialProcesses:
    """Runs trials, one at a time; a context manager that ends the last one's processes.

    Args:
        folder: gets a folder for each run, which is deleted unless the run failed.
        steps: measured steps of a trial.
        note: prints progress.
    """

    def __init__(self, folder: Path, steps: int, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._steps = steps
        self._note = note
        self._count = 0
        self._process: _TrialProcess | None = None

    def run(self, config: Config, limit_s: float, *, fresh: bool = False) -> Measurement:
        """Measure steps of a configuration; see `agentrl.tune.search.TrialRunner`.

        Raises:
            TrialError: the run failed, or took longer than ``limit_s``; its folder stays.
        """
        deadline, start_s, settings = time.monotonic() + limit_s, 0.0, HotSettings.from_config(config)
        keys = settings.other_keys(config)
        if self._process is not None and (fresh or self._process.keys != keys):
            self.close()
        try:
            if self._process is None:
                began = time.monotonic()
                self._process = self._start(config, keys)
                self._process.receive(deadline)
                start_s = time.monotonic() - began
            staleness = config.asynchronous.max_staleness
            self._process.connection.send(TrialRequest(settings, self._steps, 1 + staleness))
            steps = [self._process.receive(deadline) for _ in range(self._steps)]
        except TrialError:
            self.kill()
            raise
        except BaseException:
            self.kill(delete=True)
            raise
        return Measurement([step for step in steps if isinstance(step, StepTimes)], start_s)

    def _start(self, config: Config, keys: Tree) -> _TrialProcess:
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
        return _TrialProcess(child, near, keys, folder)

    def close(self) -> None:
        """Let the running trial's processes end, and delete its folder."""
        if self._process is not None:
            self._process.wait_ended()
        self.kill(delete=True)

    def kill(self, *, delete: bool = False) -> None:
        """End the running trial's processes; its folder stays, unless ``delete``."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            if delete:
                shutil.rmtree(process.folder)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes, at once after an error."""
        self.close() if error is None else self.kill(delete=True)


class _TrialProcess:
    """A run that takes steps on request."""

    def __init__(self, child: ChildProcess, connection: Connection, keys: Tree, folder: Path) -> None:
        self.connection = connection
        self.keys = keys
        """Of its configuration, without hot settings."""
        self.folder = folder
        self._child = child

    def receive(self, deadline: float) -> Reply:
        """Wait for a measured step, or for the start.

        Raises:
            TrialError: the run has failed, or the time is over.
        """
        while not self.connection.poll(_POLL_S):
            if time.monotonic() > deadline:
                raise TrialError(f"it took too long; its log is {self._child.log}")
            self._child.check()
        try:
            reply: Reply = self.connection.recv()
        except (EOFError, ConnectionError):
            self._child.wait_ended(_KILL_S)
            self._child.check()
            raise TrialError(f"it closed its connection; its log is {self._child.log}") from None
        if isinstance(reply, str):
            raise TrialError(f"{reply}. Its log is {self._child.log}")
        return reply

    def wait_ended(self) -> None:
        """Have the run end itself, and wait for it."""
        with suppress(OSError):
            self.connection.send(None)
        self._child.wait_ended(_END_S)

    def kill(self) -> None:
        """Interrupt the run, and kill it if it does not end."""
        self.connection.close()
        self._child.stop(_KILL_S)
