"""The calculator behind MCP: the tools of the server in ``mcp_server.py``, which a run starts as a process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from agentrl.toolserver.mcp.client import McpService


class CalculatorServer(McpService):
    """The MCP server. It has no state: with the option ``shared`` one process serves all episodes."""

    name: ClassVar[str] = "calculator_server"
    command: ClassVar[tuple[str, ...]] = (sys.executable, "-P", str(Path(__file__).with_name("mcp_server.py")))
