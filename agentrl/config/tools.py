"""The ``tools.NAME`` sections: tool servers of a run."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentrl.config.base import Seconds, Section


class ToolConfig(Section):
    """One tool server."""

    url: str | None = None
    """Address of a running server; without it, the run starts one."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server that the run starts; 0 takes a free port."""
    start_timeout_s: Seconds = 300.0
    """Seconds until that server must answer, including loading or building an index."""
    max_restarts: int = Field(default=3, ge=0)
    """How often that server is started again when it has died; after that the run ends."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the tool, see its README."""
