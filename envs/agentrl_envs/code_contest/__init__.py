"""Programming problems, scored by hidden tests."""

from agentrl.rewards.programs import HiddenTests

from .env import CodeContestEnv

__all__ = ["CodeContestEnv", "HiddenTests"]
