"""Weights out of a learner, in buckets."""
