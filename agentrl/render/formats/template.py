"""A Hugging Face chat template as a chat format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import jinja2
from transformers import PreTrainedTokenizerBase
from typing_extensions import override

from agentrl.core.errors import ModelError
from agentrl.core.tool import Tool
from agentrl.core.types import THINK, Fork, ForkReason, Message
from agentrl.render.formats.base import Format, tool_schema
from agentrl.render.formats.sampled_turns import SampledTurn, TurnLayout, find_layout, free_character
from agentrl.render.formats.template_inputs import ASK, Fields, TemplateInputs, find_inputs, texts_between_images
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.registry import parser_of_template
from agentrl.render.turn_boundary import BoundaryProbe, Reasoning, TurnKind, probe_messages

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class TemplateFormat(Format):
    """The format of the tokenizer's chat template. Without a template only raw prompts are possible.

    The template reads messages in the form that it was written for (`TemplateInputs`). A sampled turn is a placeholder
    to it, in whose place its sampled text is written: verbatim, or without reasoning if the template leaves reasoning out.

    Args:
        tokenizer: tokenizer of the policy.
        keep_thinking: keep earlier reasoning that the template would drop.
        variables: variables for the template besides messages and tools, such as ``enable_thinking``.
        parser: of its calls; the one that fits the template if None.
    """

    name = "template"
    ends: tuple[str, ...] = ()
    opens_thinking = False
    reads_sampled_calls: ClassVar[bool] = True
    writes_images: ClassVar[bool] = True

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
        self._preserves = lru_cache(maxsize=256)(self._preserves_uncached)
        self._boundary = lru_cache(maxsize=8192)(self._boundary_uncached)
        self._parser: CallParser = parser or parser_of_template(str(tokenizer.chat_template or ""))
        self.ends = self._find_ends()
        self.opens_thinking = self._opens_thinking()

    @property
    @override
    def parser(self) -> CallParser:
        return self._parser

    @cached_property
    def inputs(self) -> TemplateInputs:
        """The form in which the template reads messages."""
        return find_inputs(self._apply_probe) if self._tokenizer.chat_template else TemplateInputs()

    @cached_property
    def _layout(self) -> TurnLayout:
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        return find_layout(self._apply_probe, self.inputs, special)

    @cached_property
    def _probe(self) -> BoundaryProbe:
        return BoundaryProbe(self._render, self._layout, self.inputs.opening)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """Return the text that the template writes.

        Raises:
            ModelError: there is no template.
        """
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"tokenizer of model.path={self._tokenizer.name_or_path!r} has no chat template; set model.path to a "
                "chat or instruct model, render.format to its chat format, or data.apply_chat_template=false to give it "
                "prompts as they are"
            )
        fields, sampled = list[Fields](), list[SampledTurn]()
        mark = free_character(messages) if any(message.token_ids for message in messages) else ""
        for message in messages:
            if not message.token_ids:
                fields.append(self.inputs.fields(message))
                continue
            opened = self.opens_thinking and THINK not in message.content
            turn = SampledTurn(message, self.inputs, self.parser.markers, opened, mark, len(sampled))
            sampled.append(turn)
            fields.append(turn.fields)
        text, end = self._apply(fields, [tool_schema(tool) for tool in tools], opener), 0
        for turn in sampled:
            text, end = turn.write(text, self._layout, end, keep=self._keep)
        return text

    def _apply(self, messages: Sequence[Fields], tools: Sequence[dict[str, Any]], opener: bool) -> str:
        """Return the template's text.

        Raises:
            ValueError: the template raises something: it refuses the messages, or was not written for them.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=opener,
                tokenize=False,
                **self._variables,
            )
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(str(error) or type(error).__name__) from error
        assert isinstance(text, str)
        return text

    def _apply_probe(self, messages: Sequence[Fields], opener: bool) -> str:
        return self._apply(
            messages, [_PROBE_TOOL] if any("tool_calls" in message for message in messages) else [], opener
        )

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """Probe conversations show whether the template keeps earlier turns unchanged."""
        if not self._tokenizer.chat_template:
            return Fork(ForkReason.TEMPLATE, "there is no chat template")
        kind, roles = self._kind(history[-1]), tuple(message.role for message in new)
        offered = _Key((), tuple(tools))
        turn_kinds = {self._kind(message).unnamed for message in history if message.role == "assistant"}
        if self._keep and (
            self.opens_thinking or all(self._preserves(turn_kind.plain, roles, offered) for turn_kind in turn_kinds)
        ):
            if not self._probe.only_appends(kind.closed, roles, tools):
                detail = (
                    f"the template changes what was before, or leaves texts out, before messages of {', '.join(roles)}"
                )
                return Fork(ForkReason.TEMPLATE, detail)
            text = self._probe.text_after_reasoning(kind.closed, new, tools)
            return text or Fork(
                ForkReason.TEMPLATE, "the text that the template writes after a turn depends on earlier turns"
            )
        if kind.reasoning is Reasoning.OPEN:
            return Fork(ForkReason.THINKING, "the template closes the reasoning that the policy left open")
        changed_kinds = [turn_kind for turn_kind in turn_kinds if not self._preserves(turn_kind, roles, offered)]
        # Templates may number images.
        depends = bool(changed_kinds) or any(message.images for message in (*history, *new))
        text = None if depends else self._boundary(kind, _Key(tuple(new), tuple(tools)))
        # What holds of all conversations may not be needed of this one, such as reasoning that was left out before.
        text = text or self._boundary_here(history, kind, new, tools)
        if text is not None:
            return text
        if self._only_drops_reasoning(changed_kinds, roles, tools):
            left_out = "an empty thought" if changed_kinds[0].reasoning is Reasoning.EMPTY else "reasoning"
            return Fork(
                ForkReason.THINKING,
                f"the template, before messages of {', '.join(roles)}, leaves earlier {left_out} out",
            )
        return Fork(ForkReason.TEMPLATE, f"the template changes earlier turns before messages of {', '.join(roles)}")

    def _only_drops_reasoning(
        self, changed_kinds: Sequence[TurnKind], roles: tuple[str, ...], tools: Sequence[Tool]
    ) -> bool:
        """Return whether the template changes nothing but the reasoning of turns of ``changed_kinds``."""
        if self.opens_thinking:  # there are no turns without reasoning
            texts_after = (
                self._probe.text_after_reasoning(turn_kind, probe_messages(turn_kind, roles), tools)
                for turn_kind in changed_kinds
            )
            return bool(changed_kinds) and all(text is not None for text in texts_after)
        return bool(changed_kinds) and all(
            self._preserves(turn_kind.plain, roles, _Key((), tuple(tools))) for turn_kind in changed_kinds
        )

    def _kind(self, message: Message) -> TurnKind:
        reasoning, _ = self.inputs.split(message.content)
        if reasoning is not None:
            thought = Reasoning.SOME if reasoning.strip() else Reasoning.EMPTY
        elif self.opens_thinking or (not self.inputs.thinks and self.inputs.opening in message.content):
            thought = Reasoning.OPEN
        else:
            thought = Reasoning.NONE
        calls = message.tool_calls if len(message.tool_calls) <= self.inputs.max_calls else ()
        return TurnKind(thought, tuple((call.id, call.name) for call in calls))

    def _preserves_uncached(self, kind: TurnKind, roles: tuple[str, ...], key: _Key) -> bool:
        return self._probe.preserves(kind, roles, key.tools)

    def _boundary_uncached(self, kind: TurnKind, key: _Key) -> str | None:
        return self._probe.text_after_turn((ASK,), kind, key.messages, key.tools)

    def _boundary_here(
        self, history: Sequence[Message], kind: TurnKind, new: Sequence[Message], tools: Sequence[Tool]
    ) -> str | None:
        """Return the text after the last turn of this very conversation; None if the template changes what was before."""
        *earlier, _ = history
        probes = [self._kind(message).closed.message() if message.token_ids else message for message in earlier]
        text = self._probe.text_after_turn(probes, kind, new, tools)
        new_texts = [new_text for message in new for new_text in texts_between_images(message)]
        return text if text is not None and all(new_text in text for new_text in new_texts) else None

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], opener: bool) -> str:
        return self.text(messages, tools, opener=opener)

    def _find_ends(self) -> tuple[str, ...]:
        """Return the special tokens that end turns of the policy, that before a user message first."""
        if not self._tokenizer.chat_template:
            return ()
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        # A token between reasoning and answer ends no turn.
        return tuple(end for end in self._layout.stops if end in special and end not in self.inputs.closing)

    def _opens_thinking(self) -> bool:
        if not self._tokenizer.chat_template:
            return False
        try:
            text = self.text((ASK,), ())
        except ValueError:
            return False
        return re.search(re.escape(THINK) + r"\s*\Z", text) is not None


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
