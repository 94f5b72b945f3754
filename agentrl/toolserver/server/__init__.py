"""The HTTP server that hosts tools."""
