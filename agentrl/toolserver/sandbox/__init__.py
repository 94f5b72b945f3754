"""Sandboxes: places where a policy's code runs and can do no harm."""
