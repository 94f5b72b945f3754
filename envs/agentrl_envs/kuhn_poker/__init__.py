"""Kuhn poker for two players."""

from .env import KuhnPokerEnv
from .players import NashPlayer
from .rules import state_text

__all__ = ["KuhnPokerEnv", "NashPlayer", "state_text"]
