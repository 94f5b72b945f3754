"""Tries out what a sandbox must hold back, before a server answers."""
