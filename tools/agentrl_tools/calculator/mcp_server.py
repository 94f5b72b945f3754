"""The calculator as an MCP server over stdio, a separate program that knows nothing of agentrl's tool servers.

``python -m agentrl_tools.calculator.mcp_server``
"""

from __future__ import annotations

from agentrl_tools.calculator.evaluate import evaluate
from agentrl_tools.calculator.numbers import CalculatorError, format_number


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression exactly, such as 12 * (3 + 4)."""
    try:
        return format_number(evaluate(expression))
    except CalculatorError as error:
        return f"error: {error}"


def main() -> None:
    """Serve the tool ``calculate`` until the input ends."""
    from mcp.server import MCPServer

    server = MCPServer("calculator", log_level="WARNING")
    server.tool()(calculate)
    server.run("stdio")


if __name__ == "__main__":
    main()
