"""The client of a tool server."""
