"""The configuration of a tool server: ``agentrl tools serve --config FILE``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agentrl.config.base import Section
from agentrl.config.sandbox import SandboxConfig


class ServerConfig(Section):
    """How a server treats its sessions."""

    max_sessions: PositiveInt = 512
    """Sessions at the same time; further ones wait. An episode keeps its own until it is scored, under a reward function for
    groups until all episodes of its task have ended."""
    max_running: PositiveInt | None = None
    """Calls that use sandboxes at the same time; further ones wait, and their own time does not begin before. Without it
    eight a core: with many more, code is cut off for want of a processor that it had no part in."""
    queue_timeout_s: NonNegativeFloat = 120.0
    """Seconds a session may wait to be opened before it is refused."""
    idle_timeout_s: PositiveFloat = 900.0
    """Seconds without a call after which a session is closed."""
    drain_timeout_s: NonNegativeFloat = 10.0
    """Seconds that running calls get when the server is told to stop."""
    token: str | None = None
    """Bearer token that requests must bring; without one, that of ``AGENTRL_TOOLS_TOKEN``. Required off the loopback."""


class ClientConfig(Section):
    """How a run calls a tool server: ``tools.NAME.options.client``."""

    timeout_s: PositiveFloat = 300.0
    """Seconds one request may take, waiting for a session included."""
    retries: NonNegativeInt = 3
    """Further tries after a request that did not arrive; its call id makes them harmless."""
    token: str | None = None
    """Bearer token to send; without one, that of ``AGENTRL_TOOLS_TOKEN``."""


class ToolServerConfig(Section):
    """One server with one tool or several."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    """Its sessions."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where code runs."""
    tools: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of each tool, by the tool's name."""
