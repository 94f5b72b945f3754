"""Programming problems with hidden tests: generated ones, and the formats of published sets."""

from .data import Contest

__all__ = ["Contest"]
