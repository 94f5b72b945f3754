"""Options of the service ``terminal``."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.base import Seconds, Section
from agentrl.config.containers import ContainersConfig
from agentrl.containers.grading import GradingMode


class TerminalOptions(Section):
    """``tools.terminal.options``."""

    timeout_s: Seconds = 120.0
    """Seconds that a command may take."""
    max_chars: int = Field(default=8000, ge=100)
    """Characters of output that the policy reads; the middle of longer outputs is left out."""
    mcp_images: bool = False
    """Whether images in results of a task's MCP servers reach the policy, which must be a vision-language model. Otherwise a
    text names them."""
    grading: GradingMode = "task"
    """Where tests run: ``task``: as the task says, and separately if it says nothing; ``separate``; ``shared``."""
    containers: ContainersConfig = Field(default_factory=ContainersConfig)
    """Daemons, bounds and leases; in a run its section ``containers``."""
    owner: str = "terminal"
    """Owner of the machines, with which a restarted server finds them; in a run an id that its folder has."""
