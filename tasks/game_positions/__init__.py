"""Positions of games with random legal moves, to teach a small policy the rules."""

from .data import GamePositions

__all__ = ["GamePositions"]
