"""A list of names that grows from turn to turn and is to be kept in order."""

from .env import AlphabetSortEnv

__all__ = ["AlphabetSortEnv"]
