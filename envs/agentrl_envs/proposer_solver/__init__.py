"""One agent sets problems, others solve them."""

from .env import ProposerSolverEnv

__all__ = ["ProposerSolverEnv"]
