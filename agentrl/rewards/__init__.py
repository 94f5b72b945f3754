"""Rewards: the argument of a reward function, and helpers to write one. `agentrl.rewards.grader` calls the function."""

from agentrl.rewards.answers import answer_text, exact_match, f1, last_boxed, normalize
from agentrl.rewards.numbers import Number, last_number, same_number
from agentrl.rewards.sample import Sample

__all__ = [
    "Number",
    "Sample",
    "answer_text",
    "exact_match",
    "f1",
    "last_boxed",
    "last_number",
    "normalize",
    "same_number",
]
