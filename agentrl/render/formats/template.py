"""A Hugging Face chat template as a chat format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from agentrl.core.errors import ModelError
from agentrl.core.tool import Tool
from agentrl.core.types import Fork, ForkReason, Message
from agentrl.render.formats.base import drops_thinking, holds_empty_thought, schema_of, to_json
from agentrl.render.parsers.base import THINK, THINK_END, CallParser
from agentrl.render.parsers.registry import parser_of_template
from agentrl.render.turn_boundary import Proof, boundary_text, prove, text_after_reasoning


class TemplateFormat:
    """The format of the tokenizer's chat template. Without a template only raw prompts are possible.

    Args:
        tokenizer: tokenizer of the policy.
        keep_thinking: keep earlier reasoning that the template would drop.
        variables: variables for the template besides messages and tools, such as ``enable_thinking``.
        parser: of its calls; the one that fits the template if None.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
        parser: CallParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keep = keep_thinking
        self._variables = dict(variables or {})
        self._prove = lru_cache(maxsize=64)(self._prove_uncached)
        self._boundary = lru_cache(maxsize=8192)(self._boundary_uncached)
        self.parser: CallParser = parser or parser_of_template(str(tokenizer.chat_template or ""))
        self.ends = self._find_ends()
        self.opens_thinking = self._opens_thinking()

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """See `Format`.

        Raises:
            ModelError: there is no template.
        """
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"tokenizer of model.path={self._tokenizer.name_or_path!r} has no chat template; set model.path to a "
                "chat or instruct model, render.format to its chat format, or data.apply_chat_template=false to give it "
                "prompts as they are"
            )
        try:
            return self._apply([self._as_dict(message) for message in messages], tools, opener)
        except (jinja2.TemplateError, TypeError) as error:  # raised by templates that refuse a conversation
            if not any(message.tool_calls for message in messages):
                raise ValueError(str(error)) from error
        try:  # templates such as DeepSeek's need arguments as JSON text
            return self._apply([self._as_dict(message, arguments=to_json) for message in messages], tools, opener)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(str(error)) from error

    def _as_dict(self, message: Message, arguments: Callable[[Any], Any] = lambda given: given) -> dict[str, Any]:
        fields = _as_dict(message, arguments)
        if message.token_ids and self.opens_thinking and THINK not in message.content:
            fields["content"] = f"{THINK}\n{message.content}"  # the opener was part of the prompt
        return fields

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Tool], opener: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=[schema_of(tool) for tool in tools] or None,
            add_generation_prompt=opener,
            tokenize=False,
            **self._variables,
        )
        assert isinstance(text, str)
        return text

    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """See `Format`. Probe conversations show whether the template keeps earlier turns unchanged."""
        if not self._tokenizer.chat_template:
            return Fork(ForkReason.TEMPLATE, "there is no chat template")
        roles = tuple(message.role for message in new)
        if self.opens_thinking and self._keep:
            kept = text_after_reasoning(self._render, new, tools)
            return kept or Fork(
                ForkReason.TEMPLATE, "the text that the template writes after a turn depends on earlier turns"
            )
        if self.opens_thinking and THINK_END not in history[-1].content:
            return Fork(ForkReason.THINKING, "the template closes the reasoning that the policy left open")
        proof = self._prove(roles, _Key((), tuple(tools)))
        if not proof.preserves:
            return Fork(
                ForkReason.TEMPLATE, f"the template changes earlier turns before messages of {', '.join(roles)}"
            )
        if not proof.preserves_reasoning and not self._keep:
            fork = drops_thinking(history, f"the template, before messages of {', '.join(roles)},")
            if fork is not None:
                return fork
        if not proof.preserves_empty_thoughts and not self._keep and holds_empty_thought(history[-1].content):
            return Fork(ForkReason.THINKING, "the template leaves the empty thought of an earlier turn out")
        text = self._boundary(_Key(tuple(new), tuple(tools)))
        return text or Fork(ForkReason.TEMPLATE, f"the template refuses messages of {', '.join(roles)}")

    def _prove_uncached(self, roles: tuple[str, ...], key: _Key) -> Proof:
        return prove(self._render, roles, key.tools, opened=self.opens_thinking)

    def _boundary_uncached(self, key: _Key) -> str | None:
        return boundary_text(self._render, key.messages, key.tools, opened=self.opens_thinking)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], opener: bool) -> str:
        return self.text(messages, tools, opener=opener)

    def _find_ends(self) -> tuple[str, ...]:
        """Return the special token between a turn of the policy and a user message, or an empty tuple."""
        if not self._tokenizer.chat_template:
            return ()
        try:
            text = self.text((Message("user", "qa1"), Message("assistant", "as1"), Message("user", "nw1")), ())
        except ValueError:
            return ()
        _, there, found = text.rpartition("as1")
        if not there:  # the template drops earlier turns
            return ()
        added = self._tokenizer.added_tokens_decoder.values()
        special = [token.content for token in added if token.special and found.startswith(token.content)]
        return (max(special, key=len),) if special else ()

    def _opens_thinking(self) -> bool:
        if not self._tokenizer.chat_template:
            return False
        try:
            text = self.text((Message("user", "qa1"),), ())
        except ValueError:
            return False
        return re.search(re.escape(THINK) + r"\s*\Z", text) is not None


def _as_dict(message: Message, arguments: Callable[[Any], Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    return fields


class _Key:
    """Messages and tools as a cache key, hashed by their text because they contain JSON values."""

    __slots__ = ("_text", "messages", "tools")

    def __init__(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> None:
        self.messages = messages
        self.tools = tools
        self._text = (
            tuple(
                (message.role, message.content, message.tool_call_id, repr(message.tool_calls)) for message in messages
            ),
            tuple((tool.name, tool.description, repr(tool.parameters)) for tool in tools),
        )

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text
