"""Selection of the run's folder."""

from __future__ import annotations

import time
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError

RUNS = Path("runs")


def choose_folder(config: Config, *, resume: bool) -> Path:
    """Return the run's folder: ``run.dir``, or a new one under ``runs/``, or with ``resume`` the newest one there.

    Raises:
        ConfigError: the folder already has a run and ``resume`` is not set, or there is no run to resume.

    """
    label = Path(config.env.name.rpartition(":")[2] or config.env.name).stem
    if config.run.dir is not None:
        folder = config.run.dir.expanduser()
        if (folder / "metrics.jsonl").exists() and not resume:
            raise ConfigError(
                f"run.dir={folder} already has a run; add --resume to continue it, or set another run.dir"
            )
        return folder
    if resume:
        runs = sorted(RUNS.glob(f"{label}-*"), key=lambda run: run.stat().st_mtime)
        if not runs:
            raise ConfigError(
                f"--resume: there is no run of {label} under {RUNS.resolve()}; set run.dir to the one you mean"
            )
        return runs[-1]
    return RUNS / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
