"""Positions of games with the moves of scripted players, to teach a small policy the rules."""

from .data import GamePositions

__all__ = ["GamePositions"]
