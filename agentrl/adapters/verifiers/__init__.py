"""Environments of verifiers, with their own agents, tools and rewards."""

from agentrl.adapters.verifiers.env import VerifiersEnv

__all__ = ["VerifiersEnv"]
