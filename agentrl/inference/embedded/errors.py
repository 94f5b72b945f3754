"""Errors that the engine answers with HTTP 400."""

from __future__ import annotations

from agentrl.core.errors import AgentrlError


class BadRequestError(AgentrlError):
    """A request that cannot be served; the reply has its message."""
