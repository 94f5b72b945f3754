"""Problems with one answer: generated ones, and those of published files."""

from .data import MathProblems
from .validate import validate

__all__ = ["MathProblems", "validate"]
