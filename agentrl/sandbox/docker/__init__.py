"""Sandboxes by Docker."""
