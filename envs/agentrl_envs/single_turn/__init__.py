"""One prompt, one answer: the reward comes from a reward function."""

from .env import SingleTurnEnv

__all__ = ["SingleTurnEnv"]
