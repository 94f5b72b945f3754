"""One agent answers, another one criticises, the first answers again."""

from .env import SolverCriticEnv

__all__ = ["SolverCriticEnv"]
