"""Questions and answers in the row format that Search-R1 published."""

from .data import SearchQa

__all__ = ["SearchQa"]
