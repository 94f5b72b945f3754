"""Runs programs against hidden tests, in a sandbox of their own."""
