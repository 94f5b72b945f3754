"""Progress of a run in a notebook: one display that changes with each step, in addition to the lines of the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.api.run_page import progress_page
from agentrl.config.schema import Config
from agentrl.obs.trackers import Tracker


class _Handle(Protocol):
    """IPython's, of something that is shown."""

    def update(self, shown: Mapping[str, str], *, raw: bool) -> None:
        """Replace what is shown, by MIME type."""
        ...


class NotebookDisplay:
    """A tracker that shows steps and curve in the output of the cell that trains."""

    def __init__(self, config: Config, handle: _Handle) -> None:
        self._config = config
        self._handle = handle
        self._rows: list[dict[str, float]] = []

    def page(self) -> str:
        """Return what is shown, as HTML."""
        return progress_page(f"training {self._config.label}", self._rows, self._config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        self._rows.append({"step": float(step), **metrics})
        self._handle.update({"text/html": self.page(), "text/plain": f"step {step}"}, raw=True)

    def samples(self, step: int, table: Sequence[Sequence[object]]) -> None:
        """Show none: the run is there for them."""

    def close(self) -> None:
        """Keep what is shown."""


def notebook_trackers(config: Config) -> list[Tracker]:
    """Return the display of a run whose cell a notebook's kernel executes; none elsewhere, or with ``obs.progress=plain``."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or shell is None or not hasattr(shell, "kernel") or config.obs.progress == "plain":
        return []
    handle = ipython.display.display({"text/plain": "starting"}, raw=True, display_id=True)
    return [NotebookDisplay(config, handle)]
