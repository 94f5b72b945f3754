"""Mathematics with a Python tool; the answer is in a box."""

from .env import PythonMathEnv
from .scoring import same_answer

__all__ = ["PythonMathEnv", "same_answer"]
