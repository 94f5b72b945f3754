"""Mathematics with a Python tool."""
