"""The ``model`` section: the policy's weights; and the ``render`` section: its chat format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from agentrl.config.base import Section
from agentrl.config.secret_values import hide_secrets
from agentrl.config.services import ChatModelConfig


class ModelConfig(Section):
    """The policy."""

    endpoint: ChatModelConfig | None = None
    """A model that others serve, in place of ``path``, for ``agentrl eval`` and ``agentrl rollout``; ``--url`` and ``--model``
    set it. Its tokens are not known, so it cannot be trained."""

    path: str = "multihop-warm"
    """A local Hugging Face folder, a shipped model's name, or a hub id."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder has for its tokenizer, as Kimi's does, in every process that reads the
    tokenizer; SGLang runs the folder's model code too. This holds for the folders of reference policy, critic, teachers, frozen
    roles and judges. The learner loads weights with the code of transformers only."""
    warm_start: str | None = None
    """A configuration of ``agentrl sft``, a file or the name of a shipped one: ``agentrl train`` first fine-tunes the model
    with it, in ``warm_start/`` of the run's folder, and then trains the result. Done once; a resumed run starts from it. Ray, the
    learner's processes, tool servers and engines start meanwhile, unless the warm start and engines with
    ``sampler.sglang.mem_fraction_static`` of a GPU that both use need more than 0.95 of it."""
    warm_start_options: dict[str, Any] = Field(default_factory=dict)
    """Merged over that configuration, such as ``{sft: {minutes: 1}}``. Model, chat format and folders are the run's."""

    @property
    def label(self) -> str:
        """The policy for display: its path, or the name of the model at an endpoint and the address."""
        return self.path if self.endpoint is None else f"{self.endpoint.model} at {hide_secrets(self.endpoint.url)}"


FormatName = Literal[
    "auto", "template", "chatml", "smollm2", "qwen2.5", "qwen3", "qwen3-thinking", "qwen3-instruct", "llama3",
    "llama3.1", "llama3.2", "deepseek-v3", "deepseek-r1", "glm-4", "glm-4.5", "kimi-k2", "renderers:minimax-m2",
    "renderers:deepseek-v4", "renderers:kimi-k2.5", "renderers:gemma4", "renderers:hy3", "renderers:glm-5",
    "renderers:glm-5.1", "renderers:qwen3.5", "renderers:qwen3.6", "renderers:qwen3.8", "renderers:nemotron-3",
    "renderers:nemotron-3-ultra", "renderers:nemotron-3.5",
]  # fmt: skip
"""See `RenderConfig.format`."""

ParserName = Literal[
    "auto", "hermes", "llama3", "pythonic", "deepseek", "glm-4", "glm", "kimi", "qwen3-coder", "harmony", "minimax",
    "dsml", "step3", "atem", "mistral", "gemma", "tool-code", "lfm2", "hunyuan", "cohere", "granite", "tags",
]  # fmt: skip
"""See `RenderConfig.tool_parser`."""


class RenderConfig(Section):
    """Chat format: messages to tokens and back."""

    format: FormatName = "auto"
    """The chat format. ``auto`` selects the format whose output equals that of the tokenizer's chat template on a set of
    probe conversations, or ``template``, the template itself, if there is none. If the template does not render tools,
    the format does. ``llama3.1`` (also for 3.3) and ``llama3.2`` differ in the date in the prompt: a fixed one, or the day
    on which the run starts. ``renderers:`` and a name is a format of the package ``renderers`` (``pip install
    'agentrl-framework[renderers]'``); ``auto`` never selects one, since a chat template that it equals can be used itself."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's own chat template."""
    thinking: bool = True
    """Whether a model with both modes reasons before it answers; the template's ``enable_thinking``."""
    keep_thinking: bool = False
    """Keep earlier reasoning although the chat format removes it (Qwen3, GLM, DeepSeek R1), so that an episode stays one
    row; otherwise its trajectory forks there, with prompts as the model was trained on."""
    escape_added_tokens: bool = False
    """Keep the text of added tokens that are not special, such as Qwen's ``</think>`` and ``<tool_call>``, text in what the
    policy reads, as that of special tokens always is. Chat templates of Hugging Face make tokens of it."""
    tool_preamble: bool = False
    """Describe the environment's tools and how they are called in the system message, for chat templates that have no place
    for tools; the template then gets none. For calls of ``tool_parser`` ``hermes`` and ``tags``."""
    tool_parser: ParserName = "auto"
    """Format of the policy's tool calls; ``auto``: that of the chat format."""
