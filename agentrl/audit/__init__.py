"""Checks saved rollouts for token drift, masks and forks."""
