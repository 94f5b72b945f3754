"""Whether recorded rollouts were sampled with the tokenizer of a model."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.types import Provenance, Rollout
from agentrl.render.base import Renderer

CHECKED_PROMPTS = 8
"""Rollouts whose prompts are decoded with the model's tokenizer; at least one must match its recorded text."""


def tokenizer_fault(rollouts: Sequence[Rollout], renderer: Renderer) -> str:
    """Return how the prompts of rollouts read with another tokenizer than the one that sampled them; empty if one fits."""
    checked = [rollout for rollout in rollouts if rollout.prompt and rollout.rows][:CHECKED_PROMPTS]
    texts = [_prompts(rollout, renderer) for rollout in checked]
    if not checked or any(rollout.prompt in prompts for rollout, prompts in zip(checked, texts, strict=True)):
        return ""
    return (
        f"was sampled with another tokenizer: the prompt {checked[0].prompt[:60]!r}… reads {texts[0][0][:60]!r}… with that of "
        "model.path; set it to the model that sampled"
    )


def _prompts(rollout: Rollout, renderer: Renderer) -> list[str]:
    """Return the text of each row before its first sampled token."""
    starts = [int((row.provenance != Provenance.OBSERVED).argmax()) for row in rollout.rows]
    return [renderer.decode(row.token_ids[:at].tolist()) for row, at in zip(rollout.rows, starts, strict=True)]
