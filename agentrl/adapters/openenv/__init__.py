"""Environments behind OpenEnv's servers."""

from agentrl.adapters.openenv.env import OpenEnv

__all__ = ["OpenEnv"]
