"""Two players divide items that are worth different amounts to them."""

from .env import NegotiationEnv
from .players import GreedyPlayer

__all__ = ["GreedyPlayer", "NegotiationEnv"]
