"""Rewards: what a reward function gets, and parts of one. The grader that calls it is `agentrl.rewards.grader`."""

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
