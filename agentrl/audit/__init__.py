"""Saved rollouts checked again: that what would be trained on is what the policy sampled. Behind ``agentrl audit``."""
