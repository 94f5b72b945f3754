"""The ``model`` section: the policy's weights."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from agentrl.config.base import Section


class ModelConfig(Section):
    """The policy."""

    path: str = "multihop-warm"
    """A local Hugging Face folder, a shipped model's name, or a hub id."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder has for its tokenizer, as Kimi's does, in every process that reads the
    tokenizer; SGLang runs the folder's model code too. The learner loads weights with the code of transformers only."""
    warm_start: str | None = None
    """A configuration of ``agentrl sft``, a file or the name of a shipped one: ``agentrl train`` first fine-tunes the model
    with it, in ``warm_start/`` of the run's folder, and then trains the result. Done once; a resumed run starts from it."""
    warm_start_options: dict[str, Any] = Field(default_factory=dict)
    """Merged over that configuration, such as ``{sft: {minutes: 1}}``. Model, chat format and folders are the run's."""
