"""What the engine answers with HTTP 400."""

from __future__ import annotations

from agentrl.core.errors import AgentrlError


class BadRequestError(AgentrlError):
    """A request that cannot be served; its text goes to the caller."""
