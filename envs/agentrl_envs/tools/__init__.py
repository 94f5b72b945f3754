"""Prompts, named tools and a reward function, over several turns, without a class."""

from .env import ToolsEnv

__all__ = ["ToolsEnv"]
