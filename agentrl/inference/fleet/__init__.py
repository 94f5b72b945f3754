"""All engines of a run: routing, health, restarts."""
