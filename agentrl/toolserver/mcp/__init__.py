"""MCP both ways: tools of an MCP server as hosted tools, and hosted tools for MCP clients."""
