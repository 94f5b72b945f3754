"""Games of TextArena."""

from .env import TextArenaEnv

__all__ = ["TextArenaEnv"]
