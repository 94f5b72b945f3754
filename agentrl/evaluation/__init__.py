"""Evaluation sets, and their figures from rollouts."""

from agentrl.evaluation.figures import rollout_means
from agentrl.evaluation.intervals import mean

__all__ = ["mean", "rollout_means"]
