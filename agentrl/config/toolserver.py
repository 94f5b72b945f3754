"""The ``tools`` section, and the configuration of a tool server: ``agentrl tools serve --config FILE``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from agentrl.config.base import Seconds, Section
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.user_code import MAX_SECONDS


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


class ServerConfig(Section):
    """Sessions of a server."""

    max_sessions: PositiveInt = 512
    """Maximum concurrent sessions; further ones wait. An episode's session is open until the episode is scored, with a
    reward function for groups until all episodes of its task have ended."""
    max_running: PositiveInt | None = None
    """Maximum concurrent calls that use sandboxes; further ones wait, and their time limits start after the wait. By default
    eight per core: with many more, code exceeds its time limit only because processors are busy."""
    queue_timeout_s: float = Field(default=120.0, ge=0, le=MAX_SECONDS)
    """Seconds that a session may wait to be opened until it is refused."""
    idle_timeout_s: Seconds = 900.0
    """Seconds without a call until a session is closed."""
    drain_timeout_s: float = Field(default=10.0, ge=0, le=MAX_SECONDS)
    """Seconds that running calls may still take after the server received the signal to stop."""
    token: str | None = None
    """Bearer token that requests must have; by default ``AGENTRL_TOOLS_TOKEN``. Required if the server listens on other
    addresses than the loopback."""


class ClientConfig(Section):
    """Requests to a tool server: ``tools.NAME.options.client``."""

    timeout_s: Seconds = 300.0
    """Timeout of a request, seconds, including the wait for a session."""
    retries: NonNegativeInt = 3
    """Retries of a request that did not arrive; its call id makes them idempotent."""
    token: str | None = None
    """Bearer token to send; by default ``AGENTRL_TOOLS_TOKEN``."""


class ToolServerConfig(Section):
    """A server of one or several tools."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    """Sessions."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The sandbox that code runs in."""
    tools: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options by tool name."""
