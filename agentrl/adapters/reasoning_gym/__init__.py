"""Datasets of reasoning-gym: procedural questions, scored by the library."""

from agentrl.adapters.reasoning_gym.env import ReasoningGymEnv
from agentrl.adapters.reasoning_gym.levels import LevelCurriculum

__all__ = ["LevelCurriculum", "ReasoningGymEnv"]
