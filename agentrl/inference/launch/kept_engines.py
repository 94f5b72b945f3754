"""Engines that stay after a run for the next one (``sampler.keep_minutes``).

Each has a folder, and a keeper process outside of the run that ends it. A run that uses an engine has locked its folder. The
kernel releases the lock when the run's process ends, however that ends. If it ends without `KeptChild.release`, it is
unknown what the engine was doing, and the keeper ends it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from typing_extensions import override

from agentrl.core.atomic_files import write_atomically
from agentrl.core.child_process import ChildProcess, is_healthy, started_children
from agentrl.core.errors import AgentrlError, ConfigError, EngineError

LOCK, KEEPER, PID, EXIT, UNTIL, ENGINE = "lock", "keeper", "pid", "exit", "until", "engine.json"
"""Files: locked by the run; locked by the keeper; the engine's process id; its exit status once it has ended; until when a free
engine stays, in seconds since the epoch; what the engine is."""
_POLL_S = 0.05
_KEEPER_S = 30.0

_log = logging.getLogger(__name__)


def engines_folder() -> Path:
    """Return the folder of this user's engines on this machine, which is made; see `user_folder`."""
    engines = user_folder() / "engines"
    engines.mkdir(exist_ok=True)
    return engines


def user_folder() -> Path:
    """Return the folder of what this user's runs share on this machine, which is made.

    It is in ``XDG_RUNTIME_DIR``; on machines that lack that folder, as nodes of batch systems may, in the temporary one.

    Raises:
        ConfigError: it belongs to another user.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    has_runtime = runtime is not None and Path(runtime).is_dir()
    folder = Path(runtime or "") / "agentrl" if has_runtime else Path(tempfile.gettempdir()) / f"agentrl-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ConfigError(f"{folder} belongs to another user; set XDG_RUNTIME_DIR to a folder of yours")
    return folder


def try_lock(file: Path) -> int | None:
    """Lock a file for this process, and return its descriptor; None if another process has locked it, or it is gone."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class KeptChild(ChildProcess):
    """An engine process that a keeper holds, locked for this process until `release` or `stop`."""

    def __init__(self, folder: Path, lock: int, minutes: float, log: Path) -> None:
        """Take over an engine whose folder this process has locked with the descriptor ``lock``."""
        self.folder = folder
        self.minutes = minutes
        self.log = log
        self.name = "the engine"
        self._lock: int | None = lock
        self._error = EngineError

    @classmethod
    def start_kept(
        cls,
        minutes: float,
        command: Sequence[str],
        *,
        log: Path,
        name: str,
        env: Mapping[str, str],
        error: type[AgentrlError],
    ) -> Self:
        """Start a keeper, and by it ``command``; otherwise like `ChildProcess.start`.

        The engine stays for ``minutes`` after it is released.

        Raises:
            EngineError: the keeper does not start.
        """
        folder = Path(tempfile.mkdtemp(dir=engines_folder()))
        (folder / LOCK).touch()
        lock = try_lock(folder / LOCK)
        assert lock is not None, "the folder is new"
        child = cls(folder, lock, minutes, log.absolute())
        child.name, child._error = name, error
        log.parent.mkdir(parents=True, exist_ok=True)
        module = [sys.executable, "-m", "agentrl.inference.launch.keeper", str(folder), str(child.log), *command]
        # Processes with a variable of Ray are ended with the Ray of the run.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | dict(env)
        with log.open("ab") as output, contextlib.suppress(subprocess.TimeoutExpired):  # it is checked below
            subprocess.run(
                module,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
                timeout=_KEEPER_S,
            )
        deadline = time.monotonic() + _KEEPER_S
        while not (folder / PID).exists():
            if time.monotonic() > deadline or (folder / EXIT).exists():
                child.stop()
                raise error(f"{name} does not start; the end of its log {log}:\n{child.log_tail()}")
            time.sleep(_POLL_S)
        if (children := started_children.get()) is not None:
            children.add(child)
        return child

    @property
    @override
    def pid(self) -> int:
        return int((self.folder / PID).read_text())

    @override
    def exit_code(self) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int((self.folder / EXIT).read_text())
        keeper = try_lock(self.folder / KEEPER)
        if keeper is None and self.folder.exists():
            return None
        if keeper is not None:
            os.close(keeper)
        return -signal.SIGKILL  # the engine ends with its keeper

    @override
    def stop(self, timeout_s: float = 5.0) -> None:
        if self._lock is None:
            return
        if (self.folder / KEEPER).exists():  # a keeper that begins after the folder is gone ends
            deadline = time.monotonic() + timeout_s
            self._signal(signal.SIGTERM)
            while self.alive() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            while self.alive():
                self._signal(signal.SIGKILL)
                time.sleep(_POLL_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.unlock()

    def release(self) -> None:
        """Leave the engine, which is whole and idle, to the next run."""
        with write_atomically(self.folder / UNTIL) as partial:
            partial.write_text(str(time.time() + 60 * self.minutes))
        self.unlock()

    def describe(self, record: EngineRecord) -> None:
        """Write what the engine is, once it is healthy."""
        with write_atomically(self.folder / ENGINE) as partial:
            partial.write_text(json.dumps(asdict(record)))

    def unlock(self) -> None:
        """Leave the engine as it is."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @override
    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if self.alive():  # else its id may be another process's
                os.killpg(self.pid, number)


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What a kept engine is."""

    key: str
    """Equal for engines that a run can use in place of each other."""
    url: str
    log: str
    text: str
    """Its kind and model, for users."""
    gpus: list[str]


def read_record(folder: Path) -> EngineRecord | None:
    """Return what the engine of a folder is; None before it is healthy."""
    try:
        return EngineRecord(**json.loads((folder / ENGINE).read_text()))
    except FileNotFoundError:
        return None


def free_engines() -> Iterator[tuple[EngineRecord, KeptChild]]:
    """Yield the engines that no run uses, locked for this process; the caller unlocks or stops each before the next."""
    for folder in sorted(engines_folder().iterdir()):
        lock = try_lock(folder / LOCK)
        if lock is None:
            continue
        record = read_record(folder)
        if record is None or not (folder / UNTIL).exists():
            os.close(lock)  # its keeper ends it
            continue
        until = float((folder / UNTIL).read_text())
        child = KeptChild(folder, lock, max(0.0, until - time.time()) / 60, Path(record.log))
        if child.alive():
            yield record, child
        else:
            child.stop()  # removes what its keeper has left


def take_engine(key: str, minutes: float) -> tuple[EngineRecord, KeptChild] | None:
    """Return a healthy free engine with a key, locked for this process, which stays for ``minutes`` after it is released."""
    for record, child in free_engines():
        if record.key != key:
            child.unlock()
        elif not is_healthy(f"{record.url}/server_info"):
            _log.warning("the engine at %s, which an earlier run has left, does not answer: it is ended", record.url)
            child.stop(0.0)
        else:
            (child.folder / UNTIL).unlink()
            child.minutes = minutes
            return record, child
    return None


def end_engines_on(gpus: Sequence[str], port: int = 0) -> None:
    """End free engines that hold memory of GPUs, or the port, which another engine is to get."""
    if not gpus and not port:
        return
    for record, child in free_engines():
        if set(record.gpus) & set(gpus) or port == urlsplit(record.url).port:
            _log.warning(
                "%s at %s, which an earlier run has left, makes room for another engine", record.text, record.url
            )
            child.stop(0.0)
        else:
            child.unlock()


def end_engines_below(folder: Path) -> None:
    """End free engines whose log is in a folder, or in one inside of it."""
    for record, child in free_engines():
        if Path(record.log).is_relative_to(folder.absolute()):
            child.stop(0.0)
        else:
            child.unlock()
