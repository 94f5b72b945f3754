"""trackio: metrics of a run in a local database, at a server or in a Space of Hugging Face."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from pathlib import Path
from typing import Protocol

from agentrl.core.extras import require
from agentrl.obs.trackers import COLUMNS, run_id


class _Run(Protocol):
    """What is used of ``trackio.Run``."""

    def log(self, metrics: dict[str, object], step: int | None = None) -> None: ...

    def finish(self) -> None: ...


class Trackio:
    """A run at trackio; opened by `open_trackio`. Its own thread writes what is logged."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics. trackio keeps both values of a step that a resumed run repeats."""
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, table: Sequence[Sequence[object]]) -> None:
        """Log the sample table of a step."""
        import trackio

        self._run.log({"samples": trackio.Table(columns=list(COLUMNS), data=[list(line) for line in table])}, step=step)

    def close(self) -> None:
        """Write pending data, for half a minute at most."""
        with _silent_stdout():
            self._run.finish()


def open_trackio(
    folder: Path, project: str, *, config: Mapping[str, object], note: Callable[[str], None]
) -> Trackio | None:
    """Start a run at trackio, or resume that of ``folder``.

    Returns None, and calls ``note``, if trackio refuses: the training run continues without it.

    Args:
        folder: folder of the run. The run's name at trackio is that of the folder, and an id.
        project: at trackio.
        config: configuration to log.
        note: prints a message for the user.

    Raises:
        MissingError: the package is not installed.
    """
    require("trackio", "obs.trackio=true")
    import trackio

    name = f"{folder.resolve().name}-{run_id(folder)}"
    settings = {"name": name, "resume": "allow", "config": dict(config), "embed": False}
    try:
        with _silent_stdout():
            # An empty context: a run that the caller's script has open at trackio would be finished otherwise.
            run = Context().run(trackio.init, project, **settings, auto_log_cpu=False, auto_log_gpu=False)
    except Exception as error:  # any error: a tracker that fails must not end the run
        note(f"the run continues without trackio: {type(error).__name__}: {error}")
        return None
    note(f"trackio: run {name} of project {project}; `trackio show --project {project}` shows it")
    return Trackio(run)


def _silent_stdout() -> contextlib.redirect_stdout[io.StringIO]:
    """Keep trackio's prints out of the live table."""
    return contextlib.redirect_stdout(io.StringIO())
