"""Small tasks that a policy learns in minutes: the suite of ``agentrl bench learning``."""

from .alphabet_sort import AlphabetSort
from .answers import OwnAnswers
from .arithmetic import Arithmetic
from .guesses import GuessPositions
from .reverse_text import ReverseText

__all__ = [
    "AlphabetSort",
    "Arithmetic",
    "GuessPositions",
    "OwnAnswers",
    "ReverseText",
]
