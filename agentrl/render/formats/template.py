"""Any Hugging Face chat template as a chat format."""

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
    """What the tokenizer's chat template says. A tokenizer without one can do raw prompts only.

    Args:
        tokenizer: the policy's.
        keep_thinking: keep earlier reasoning in place where the template would leave it out.
        variables: what the template is given beside messages and tools, such as ``enable_thinking``.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_thinking: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keep = keep_thinking
        self._variables = dict(variables or {})
        self._prove = lru_cache(maxsize=64)(self._prove_uncached)
        self._boundary = lru_cache(maxsize=8192)(self._boundary_uncached)
        self.parser: CallParser = parser_of_template(str(tokenizer.chat_template or ""))
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
        except (jinja2.TemplateError, TypeError) as error:  # how templates say that they know no such conversation
            if not any(message.tool_calls for message in messages):
                raise ValueError(str(error)) from error
        try:  # templates such as DeepSeek's want arguments as the text of a JSON object
            return self._apply([self._as_dict(message, arguments=to_json) for message in messages], tools, opener)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(str(error)) from error

    def _as_dict(self, message: Message, arguments: Callable[[Any], Any] = lambda given: given) -> dict[str, Any]:
        said = _as_dict(message, arguments)
        if message.token_ids and self.opens_thinking and THINK not in message.content:
            said["content"] = f"{THINK}\n{message.content}"  # the opener, which stood before it
        return said

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
        """See `Format`. What dummy conversations show of the template decides."""
        if not self._tokenizer.chat_template:
            return Fork(ForkReason.TEMPLATE, "there is no chat template")
        roles = tuple(message.role for message in new)
        if self.opens_thinking and self._keep:
            kept = text_after_reasoning(self._render, new, tools)
            return kept or Fork(ForkReason.TEMPLATE, "what the template writes after a turn depends on what was before")
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
        """Return the special token that follows what the policy said before a user's message, or nothing."""
        if not self._tokenizer.chat_template:
            return ()
        try:
            text = self.text((Message("user", "qa1"), Message("assistant", "as1"), Message("user", "nw1")), ())
        except ValueError:
            return ()
        _, there, found = text.rpartition("as1")
        if not there:  # the template leaves out what was said before
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
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id is not None:
        said["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        said["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    return said


class _Key:
    """Messages and tools as a cache key: they hold JSON values, which cannot be hashed, so their text is."""

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
