"""Qwen3: Qwen2.5's turns with reasoning in ``<think>``, which is dropped from turns before the last user message."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Fork, ForkReason, Message
from agentrl.render.formats.base import Format, drops_thinking, holds_empty_thought, split_thinking
from agentrl.render.formats.chatml import END, OPENER, START, call_text, qwen_turn, split_system, tools_text, turn
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.hermes import HermesParser

EMPTY_THOUGHT = f"{THINK}\n\n{THINK_END}\n\n"
"""End of the opener if thinking is disabled."""


class Qwen3Instruct(Format):
    """Qwen3 Instruct (2507): no reasoning, and earlier turns stay unchanged."""

    name = "qwen3-instruct"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = HermesParser()

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        system, turns = split_system(messages)
        if tools:
            head = turn("system", (f"{system}\n\n" if turns is not messages else "") + tools_text(tools))
        else:
            head = turn("system", system) if turns is not messages else ""
        return head + self._turns(turns) + (self._opener if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return f"{END}\n" + self._turns(new, after_query=any(map(is_query, history))) + self._opener

    @property
    def _opener(self) -> str:
        return OPENER

    def _turns(self, messages: Sequence[Message], *, after_query: bool = False) -> str:
        """Return the text of messages after the system message; ``after_query`` is whether a user query precedes them."""
        return "".join(
            _assistant(message, "", message.content) if message.role == "assistant" else qwen_turn(messages, index)
            for index, message in enumerate(messages)
        )


class Qwen3(Qwen3Instruct):
    """Qwen3 as first released, which reasons unless thinking is disabled.

    Args:
        thinking: whether the model reasons; if not, the opener has an empty thought.
        keep_thinking: keep all reasoning, unlike the template, so that a conversation stays one row.
        opens_thinking: the opener ends with ``<think>`` (Qwen3 Thinking 2507).
    """

    name = "qwen3"

    def __init__(self, *, thinking: bool = True, keep_thinking: bool = False, opens_thinking: bool = False) -> None:
        self._thinking = thinking
        self._keep = keep_thinking
        self.opens_thinking = opens_thinking
        self.name = "qwen3-thinking" if opens_thinking else "qwen3"

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        fork = None if self._keep else self._fork(history, new)
        return fork or super().boundary(history, new, tools)

    def _fork(self, history: Sequence[Message], new: Sequence[Message]) -> Fork | None:
        """Return a `Fork` if `text` would change a turn since the last query."""
        last, content = _last_query(history), history[-1].content
        if last is None or any(map(is_query, new)):  # without a query, no turn but the last keeps its reasoning
            fork = drops_thinking(history[-1:] if last is None else history[last + 1 :], "a new user message")
            if fork is not None:
                return fork
        if not self._thinking:
            return Fork(ForkReason.THINKING, "the empty thought of the opener is left out of earlier turns")
        if self.opens_thinking and THINK_END not in content:
            return Fork(
                ForkReason.THINKING, "the opener's <think> is left out of an earlier turn that did not close it"
            )
        if holds_empty_thought(content):
            return Fork(ForkReason.THINKING, "an empty thought is left out of earlier turns")
        return None

    @property
    def _opener(self) -> str:
        if self.opens_thinking:
            return f"{OPENER}{THINK}\n"
        return OPENER if self._thinking else OPENER + EMPTY_THOUGHT

    def _turns(self, messages: Sequence[Message], *, after_query: bool = False) -> str:
        last_query = _last_query(messages)
        last_before = last_query if last_query is not None else -1 if after_query else len(messages) - 1
        return "".join(
            _assistant(message, *self._content(message, index > last_before, index == len(messages) - 1))
            if message.role == "assistant"
            else qwen_turn(messages, index)
            for index, message in enumerate(messages)
        )

    def _content(self, message: Message, current: bool, final: bool) -> tuple[str, str]:
        """Return thought and content of an assistant message as in the template: a thought only in the ``current`` exchange."""
        if self._keep and message.token_ids:
            return self._opener.removeprefix(OPENER), message.content
        reasoning, content = split_thinking(message.content)
        if message.token_ids and current and reasoning:
            return self._opener.removeprefix(OPENER), message.content
        if (current and (final or reasoning)) or (self._keep and reasoning):
            return f"{THINK}\n{reasoning.strip(chr(10))}\n{THINK_END}\n\n", content.lstrip(chr(10))
        return "", content


def is_query(message: Message) -> bool:
    """Return whether a message is a user's query rather than a tool result in a user turn."""
    is_tool_response = message.content.startswith("<tool_response>") and message.content.endswith("</tool_response>")
    return message.role == "user" and not is_tool_response


def _last_query(messages: Sequence[Message]) -> int | None:
    return next((index for index in range(len(messages) - 1, -1, -1) if is_query(messages[index])), None)


def _assistant(message: Message, thought: str, content: str) -> str:
    calls = [call_text(call) for call in message.tool_calls]
    return f"{START}assistant\n{thought}" + "\n".join(([content] if content or not calls else []) + calls) + f"{END}\n"
