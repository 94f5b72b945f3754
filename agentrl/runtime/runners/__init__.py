"""Processes that run the episodes of a run, and the pool of them."""
