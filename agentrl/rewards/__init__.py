"""Rewards: the argument of a reward function, and helpers to write one. `agentrl.rewards.grader` calls the function."""

from agentrl.rewards.answers import exact_match, f1, normalize, squad_normalize
from agentrl.rewards.extraction import answer_text, last_boxed
from agentrl.rewards.numbers import last_number, same_number
from agentrl.rewards.sample import Sample

__all__ = [
    "Sample",
    "answer_text",
    "exact_match",
    "f1",
    "last_boxed",
    "last_number",
    "normalize",
    "same_number",
    "squad_normalize",
]
