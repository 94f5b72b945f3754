"""Chat formats of the package ``renderers``, for families for which agentrl has no format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.core.errors import ModelError
from agentrl.core.extras import require
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.parsers.registry import PARSERS

PREFIX = "renderers:"

PACKAGE_FORMATS: Mapping[str, str] = {
    "renderers:minimax-m2": "minimax",
    "renderers:deepseek-v4": "dsml",
    "renderers:kimi-k2.5": "kimi",
    "renderers:gemma4": "gemma",
    "renderers:hy3": "hunyuan",
    "renderers:glm-5": "glm",
    "renderers:glm-5.1": "glm",
    "renderers:qwen3.5": "qwen3-coder",
    "renderers:qwen3.6": "qwen3-coder",
    "renderers:qwen3.8": "qwen3-coder",
    "renderers:nemotron-3": "qwen3-coder",
    "renderers:nemotron-3-ultra": "qwen3-coder",
    "renderers:nemotron-3.5": "qwen3-coder",
}
"""Formats by ``render.format``, each with its tool-call parser (``render.tool_parser``)."""


class PackageFormat(TemplateFormat):
    """A format of the package ``renderers``. Its text takes the place of a chat template's, with the same proofs.

    Args:
        name: one of `PACKAGE_FORMATS`.
        tokenizer: tokenizer of the policy; its chat template, if it has one, is not used.
        keep_thinking: keep earlier reasoning that the format would drop.
        variables: variables for the format, such as ``enable_thinking``; those that it does not have are left out.

    Raises:
        MissingError: the package is not installed.
        ModelError: the tokenizer lacks the format's tokens.
    """

    def __init__(
        self,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        template: Any = _PackageTemplate(name, tokenizer, variables or {})
        super().__init__(template, keep_thinking=keep_thinking, parser=PARSERS[PACKAGE_FORMATS[name]]())
        self.name = name
        self.ends = tuple(dict.fromkeys((*self.ends, *template.stops)))


class _PackageTemplate:
    """A tokenizer whose chat template is code of the package ``renderers``."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        require("renderers", f"render.format={name}")
        from renderers import config_from_name, create_renderer

        config = config_from_name(name.removeprefix(PREFIX))
        assert config is not None, "only the name auto has none"
        supported = {key: value for key, value in variables.items() if key in config.template_field_names()}
        self.name_or_path: str = tokenizer.name_or_path
        self.added_tokens_decoder = tokenizer.added_tokens_decoder
        self.chat_template = name
        self._tokenizer = tokenizer
        try:
            self._renderer = create_renderer(tokenizer, config, chat_template_kwargs=supported)
        except Exception as error:  # such as an AssertionError for a missing token
            raise ModelError(
                f"render.format={name} does not fit the tokenizer of model.path={self.name_or_path!r}: {error}"
            ) from error

    @property
    def stops(self) -> list[str]:
        """The tokens at which the package stops a turn, such as the one that starts a tool's response."""
        return [str(self._tokenizer.decode([index])) for index in self._renderer.get_stop_token_ids()]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
    ) -> str:
        """Return the text of messages, as transformers' method of this name does.

        Raises:
            ValueError: the package refuses the messages.
        """
        assert not tokenize
        tool_list: Any = None if tools is None else list(tools)
        try:
            ids = self._renderer.render_ids(messages, tools=tool_list, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # of any kind, as it refuses a conversation
            raise ValueError(str(error) or type(error).__name__) from error
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
