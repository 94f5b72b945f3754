"""The judge as agentrl starts and calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl import Tool
from agentrl.config.base import Section
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.service import HostedService

from .options import JudgeOptions
from .tool import JudgeTool


class JudgeService(HostedService):
    """Programs scored on hidden tests in fresh sandboxes; for environments, never for the policy."""

    name: ClassVar[str] = "judge"
    Options: ClassVar[type[Section]] = JudgeOptions
    needs_sandbox: ClassVar[bool] = True

    def create_tools(self, options: Section) -> Sequence[HostedTool]:
        """Return the one tool."""
        assert isinstance(options, JudgeOptions)
        return [JudgeTool(options)]

    def tools(self, options: Mapping[str, Any]) -> tuple[Tool, ...]:
        """Return no tool: the policy must not learn how its program does on the hidden tests."""
        return ()
