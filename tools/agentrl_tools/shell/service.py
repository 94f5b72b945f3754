"""The shell tool as agentrl starts and calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from agentrl.config.base import Seconds, Section
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.service import HostedService

from .tool import ShellTool


class ShellOptions(Section):
    """``tools.shell.options``."""

    timeout_s: Seconds | None = None
    """Seconds a call may take; without it ``sandbox.limits.wall_s``."""
    max_chars: int = Field(default=8000, ge=100)
    """Characters of output that the policy reads; the middle of longer outputs is left out."""


class ShellService(HostedService):
    """Shell commands in the episode's sandbox."""

    name: ClassVar[str] = "shell"
    Options: ClassVar[type[Section]] = ShellOptions
    needs_sandbox: ClassVar[bool] = True

    def create_tools(self, options: ShellOptions) -> Sequence[HostedTool]:
        """Return the one tool."""
        return [ShellTool(self.name, timeout_s=options.timeout_s, max_chars=options.max_chars)]
