"""Games of TextArena."""

from agentrl.adapters.textarena.env import TextArenaEnv

__all__ = ["TextArenaEnv"]
