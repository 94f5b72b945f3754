"""Programming problems, scored by hidden tests."""

from .env import CodeContestEnv
from .hidden import HiddenTests

__all__ = ["CodeContestEnv", "HiddenTests"]
