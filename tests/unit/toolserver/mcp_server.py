"""An MCP server for tests, made with the SDK; run as a program it speaks over its standard streams."""

import os
import sys
from typing import Any

import anyio
import mcp.types as types
from mcp import MCPError
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

ANYTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {
    "echo": TEXT,
    "count": ANYTHING,
    "fail": ANYTHING,
    "raise": ANYTHING,
    "refuse": ANYTHING,
    "picture": ANYTHING,
    "figures": ANYTHING,
    "sleep": ANYTHING,
    "own_timeout": ANYTHING,
    "whoami": ANYTHING,
}
counted = 0


def text(content: str, *, is_error: bool = False) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=content)], is_error=is_error)


async def list_tools(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
    """Two pages."""
    tools = [types.Tool(name=name, description=f"Do {name}.", input_schema=schema) for name, schema in SCHEMAS.items()]
    if params is None or params.cursor is None:
        return types.ListToolsResult(tools=tools[:4], next_cursor="more")
    return types.ListToolsResult(tools=tools[4:])


async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    global counted
    counted += 1
    arguments = params.arguments or {}
    match params.name:
        case "echo":
            return text(arguments["text"])
        case "count":
            return text(str(counted))
        case "fail":
            return text("it did not work", is_error=True)
        case "raise":
            raise RuntimeError("a fault of the server's")
        case "refuse":
            raise MCPError(types.INVALID_PARAMS, "not these arguments")
        case "picture":
            return types.CallToolResult(
                content=[
                    types.TextContent(text="see:"),
                    types.ImageContent(data="aGk=", mime_type="image/png"),
                    types.EmbeddedResource(resource=types.TextResourceContents(uri="file:///a", text="words")),
                    types.ResourceLink(name="b", uri="file:///b"),
                ]
            )
        case "figures":
            return types.CallToolResult(content=[], structured_content={"sum": 3})
        case "own_timeout":
            raise MCPError(types.REQUEST_TIMEOUT, "the database took too long")
        case "sleep":
            await anyio.sleep(60)
        case "whoami":
            return types.CallToolResult(
                content=[],
                structured_content={
                    "pid": os.getpid(),
                    "cwd": os.getcwd(),
                    "variables": sorted(os.environ),
                    "arguments": sys.argv[1:],
                },
            )
    return text("there is no such tool", is_error=True)


server: Server[Any] = Server("for tests", on_list_tools=list_tools, on_call_tool=call_tool)


async def main() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
