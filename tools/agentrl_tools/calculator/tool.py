"""The calculator as a tool of a server."""

from __future__ import annotations

from fractions import Fraction

from agentrl import Tool, ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession

from .evaluate import evaluate
from .functions import CONSTANTS, FUNCTIONS
from .numbers import CalculatorError, format_number

_DESCRIPTION = (
    "Evaluate an arithmetic expression exactly, such as (3/4 + 0.1) * 12**2 or sqrt(2) * factorial(10). "
    f"Operators: + - * / // % **. Functions: {', '.join(FUNCTIONS)}. Constants: {', '.join(CONSTANTS)}. Angles in radians."
)
_PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "The expression."}},
    "required": ["expression"],
    "additionalProperties": False,
}


class CalculatorTool(HostedTool):
    """Exact arithmetic.

    Args:
        name: what the policy calls it.
    """

    def __init__(self, name: str = "calculator") -> None:
        super().__init__(Tool(name, _DESCRIPTION, _PARAMETERS))

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Evaluate the argument ``expression``; the data are ``{"value", "exact"}``."""
        try:
            number = evaluate(call.arguments["expression"])
        except CalculatorError as error:
            return ToolResult(call.id, ToolStatus.ERROR, f"error: {error}")
        exact = isinstance(number, Fraction)
        return ToolResult(call.id, ToolStatus.OK, format_number(number), {"value": str(number), "exact": exact})
