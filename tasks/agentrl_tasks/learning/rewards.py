"""The reward function of ReverseText."""

from __future__ import annotations

from agentrl import Sample
from agentrl.rewards.similarity import similarity


def reverse_text(sample: Sample) -> dict[str, float]:
    """Return the similarity of the answer to the label as ``score``, and as ``exact`` whether they are equal."""
    answer = sample.final.strip()
    return {"score": similarity(answer, str(sample.label)), "exact": float(answer == sample.label)}
