"""Games that begin after some random moves."""

from .data import GameOpenings

__all__ = ["GameOpenings"]
