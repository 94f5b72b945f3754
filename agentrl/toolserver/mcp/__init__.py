"""MCP: tools of an MCP server as ours, and ours over MCP."""
