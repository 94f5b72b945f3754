"""Evaluation: task sets, pass@k, confidence intervals, tables."""
