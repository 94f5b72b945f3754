"""How messages become tokens: the ``render`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from agentrl.config.base import Section

FormatName = Literal[
    "auto",
    "template",
    "chatml",
    "smollm2",
    "qwen2.5",
    "qwen3",
    "qwen3-thinking",
    "qwen3-instruct",
    "llama3",
    "llama3.1",
    "llama3.2",
    "deepseek-v3",
    "deepseek-r1",
    "glm-4",
    "glm-4.5",
    "kimi-k2",
]
"""See `RenderConfig.format`."""

ParserName = Literal["auto", "hermes", "llama3", "pythonic", "deepseek", "glm-4", "glm", "kimi", "qwen3-coder", "tags"]
"""See `RenderConfig.tool_parser`."""


class RenderConfig(Section):
    """How messages become tokens, and tokens messages."""

    format: FormatName = "auto"
    """The chat format. ``auto`` takes the one that writes, character for character, what the tokenizer's chat template
    writes of a set of conversations, and ``template``, the template itself, where there is none; a template
    that gives tools no place leaves them to the format. ``llama3.1`` (also for
    3.3) and ``llama3.2`` differ in the date that the policy is told: a fixed one, or the day on which the run starts."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""
    thinking: bool = True
    """Whether a model that can do both is to reason before it speaks; the template's ``enable_thinking``."""
    keep_thinking: bool = False
    """Keep earlier reasoning where the chat format leaves it out (Qwen3, GLM, DeepSeek R1), so that an episode stays one
    row; otherwise its trajectory forks there, as the model was trained to be prompted."""
    tool_parser: ParserName = "auto"
    """How the policy writes tool calls; ``auto`` follows the chat format."""
