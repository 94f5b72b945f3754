"""Tasks of NeMo Gym's resource servers."""

from agentrl.adapters.nemo_gym.env import NemoGymEnv

__all__ = ["NemoGymEnv"]
