"""The ``env`` section: the environment."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentrl.config.base import Section


class EnvConfig(Section):
    """Which environment, and its constructor's arguments."""

    name: str = "search_r1"
    """A registered environment, or ``path/to/file.py:Class``; ``--env`` sets it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
