"""The folder of a run: which one a command takes, what a new run may not overwrite, and the lock of its process."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.layers import CONFIG
from agentrl.config.schema import Config
from agentrl.core.atomic_files import append_to
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import STATE, latest_checkpoint
from agentrl.obs.journal import has_journal

LOCK = "lock"
"""File in the run's folder that the running process has locked; it names the process."""
_HOLDER = re.compile(r"process (\d+) on (\S+) since (.+)")


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that has locked a run's folder, or had."""

    pid: int
    host: str
    since: str
    """Local time of its machine."""
    alive: bool
    """Whether it holds the lock. False for a process of another machine, if the file system has no locks between machines."""

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()


def lock_holder(folder: Path) -> LockHolder | None:
    """Return the process that locked a folder last, or None if none did."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(handle, encoding="utf-8") as file:
        match = _HOLDER.fullmatch(file.read().strip())
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = False
        except OSError:
            alive = True
    return None if match is None else LockHolder(int(match[1]), match[2], match[3], alive)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of a run, and lock it for this process. The kernel releases the lock when the process ends.

    Raises:
        ConfigError: another process has locked it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(folder, error) from None
    with os.fdopen(handle, "r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run.dir={folder} is in use by {file.read().strip()}; set another run.dir") from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder} cannot be locked: {error.strerror or error}; set run.dir to a file system with locks"
            ) from None
        os.ftruncate(handle, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
        append_to(handle, folder / LOCK, holder.encode())
        yield


RUNS = Path("runs")
SFT = "sft"
"""Name of runs of ``agentrl sft``, which ``agentrl train --resume`` does not continue."""


def new_folder(config: Config, name: str = "") -> Path:
    """Return the folder of a new run: ``run.dir``, or a new folder under ``runs/``, by default named after the environment.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.run.dir is not None:
        return config.run.dir.expanduser()
    stem = f"{name or _label(config.label)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))  # runs of the same second
    return next(RUNS / name for name in names if _make_folder(RUNS / name))


def _make_folder(folder: Path) -> bool:
    """Make a folder. Return False if it is there already."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir={folder} cannot be written: {error.strerror or error}")


def check_new(folder: Path) -> None:
    """Check that a new run would overwrite nothing in its folder.

    Raises:
        ConfigError: the folder already has a run.
    """
    if has_results(folder):
        raise ConfigError(f"run.dir={folder} already has a run; add --resume to continue it, or set another run.dir")


@contextmanager
def run_folder(config: Config, resumed: Path | None = None, *, name: str = "") -> Iterator[Path]:
    """Yield the folder of a new run (see `new_folder`), or of a resumed run, locked for this process.

    Raises:
        ConfigError: another process has locked it, it cannot be written, or a new run would overwrite an older one.
    """
    folder = resumed or new_folder(config, name)
    with locked(folder):
        if resumed is None:
            check_new(folder)
        yield folder


def folder_to_resume(run_dir: str | None, env: str | None) -> Path:
    """Return the folder of the run that ``--resume`` continues: ``run_dir``, or the newest under ``runs/`` with a checkpoint.

    Args:
        run_dir: ``run.dir`` of the command line.
        env: without ``run_dir``, only runs of this environment; None: of any.

    Raises:
        ConfigError: there is no such run, or it has results but neither a checkpoint nor a journal.
    """
    if run_dir is None:
        return _newest(env)
    folder = Path(run_dir).expanduser()
    if not (folder / CONFIG).is_file():
        runs = [str(run.parent) for run in sorted(folder.parent.glob(f"*/{CONFIG}"))]
        hint = f"; runs there: {', '.join(runs)}" if runs else ""
        raise ConfigError(f"--resume: run.dir={folder} is no run, because it has no {CONFIG}{hint}")
    if latest_checkpoint(folder / "checkpoints") is None and has_results(folder) and not has_journal(folder):
        raise ConfigError(
            f"--resume: run.dir={folder} has metrics or rollouts but no journal, and no whole checkpoint in "
            f"{folder / 'checkpoints'}. Nothing "
            f"of it is overwritten; start again with agentrl train --config {folder / CONFIG} and another run.dir"
        )
    return folder


def _newest(env: str | None) -> Path:
    saved = {
        run: (checkpoint / STATE).stat().st_mtime_ns
        for run in RUNS.glob(f"{_label(env)}-*" if env else "*")
        if not run.name.startswith(f"{SFT}-")
        and (run / CONFIG).is_file()
        and (checkpoint := latest_checkpoint(run / "checkpoints"))
    }
    if not saved:
        of = f" of {env}" if env else ""
        raise ConfigError(
            f"--resume: no run{of} under {RUNS.resolve()} has a checkpoint; set run.dir to the one you mean"
        )
    return max(saved, key=lambda run: saved[run])


def has_results(folder: Path) -> bool:
    """Return whether a run has left anything in a folder that another one would overwrite: metrics, rollouts, checkpoints."""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        return True
    return has_journal(folder) or any(any((folder / name).glob("*")) for name in ("rollouts", "checkpoints"))


def _label(env: str) -> str:
    return Path(env.rpartition(":")[2] or env).stem
