"""The calculator as agentrl starts and calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agentrl.config.base import Section
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.service import HostedService

from .tool import CalculatorTool


class CalculatorOptions(Section):
    """``tools.calculator.options``: there are none."""


class CalculatorService(HostedService):
    """Exact arithmetic; it executes nothing and needs no sandbox."""

    name: ClassVar[str] = "calculator"
    Options: ClassVar[type[Section]] = CalculatorOptions

    def create_tools(self, options: CalculatorOptions) -> Sequence[HostedTool]:
        """Return the one tool."""
        return [CalculatorTool(self.name)]
