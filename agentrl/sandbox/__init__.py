"""Sandboxes for code that the policy writes: backends, the runner inside, the canary."""
