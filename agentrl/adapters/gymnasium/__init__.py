"""Environments of Gymnasium, whose observations become texts, and which take texts as actions."""

from agentrl.adapters.gymnasium.env import GymnasiumEnv

__all__ = ["GymnasiumEnv"]
