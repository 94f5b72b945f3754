"""A shell in a sandbox."""
