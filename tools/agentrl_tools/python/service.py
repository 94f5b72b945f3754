"""The Python tool as agentrl starts and calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from agentrl.config.base import Seconds, Section
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.service import HostedService

from .tool import PythonTool


class PythonOptions(Section):
    """``tools.python.options``."""

    stateful: bool = False
    """Keep variables, functions and imports from call to call."""
    timeout_s: Seconds | None = None
    """Seconds a call may take; without it ``sandbox.limits.wall_s``."""
    max_chars: int = Field(default=8000, ge=100)
    """Characters of output that the policy reads; the middle of longer outputs is left out."""


class PythonService(HostedService):
    """Python in the episode's sandbox."""

    name: ClassVar[str] = "python"
    Options: ClassVar[type[Section]] = PythonOptions
    needs_sandbox: ClassVar[bool] = True

    def create_tools(self, options: PythonOptions) -> Sequence[HostedTool]:
        """Return the one tool."""
        return [
            PythonTool(self.name, stateful=options.stateful, timeout_s=options.timeout_s, max_chars=options.max_chars)
        ]
