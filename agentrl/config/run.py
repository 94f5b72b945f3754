"""The ``run`` section: the run's folder and its seed."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.config.base import Section


class RunConfig(Section):
    """Where a run is stored, and its seed."""

    dir: Path | None = None
    """The run's folder; without it, ``runs/<environment>-<time>``."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, episodes and sampling."""
