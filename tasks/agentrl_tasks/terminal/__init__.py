"""Exercises for a shell in a container, from writing a file to mending a service."""

from .data import TerminalExercises

__all__ = ["TerminalExercises"]
