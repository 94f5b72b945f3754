"""Kuhn poker for two players."""

from .env import KuhnPokerEnv, state_text
from .players import NashPlayer

__all__ = ["KuhnPokerEnv", "NashPlayer", "state_text"]
