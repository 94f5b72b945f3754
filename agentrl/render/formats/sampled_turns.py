"""Sampled turns in a chat template's text: placeholders that the template writes, and the sampled text in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.core.types import THINK, THINK_END, Message, ToolCall
from agentrl.render.formats.template_inputs import (
    ASK,
    CALLS,
    MARKUP,
    MORE,
    REASONED,
    RESULTS,
    SAID,
    THOUGHT,
    Apply,
    Fields,
    TemplateInputs,
    shared_prefix,
    try_text,
)

_PRIVATE = range(0xE002, 0xF8FF)
"""Characters of the private use area; one that no message contains marks placeholders."""


@dataclass(frozen=True, slots=True)
class TurnLayout:
    """What a chat template writes around the policy's turns."""

    start: str
    """Text at the start of every turn of an assistant; the next turn's opener starts with it."""
    opened: str
    """The rest of the opener."""
    ends: tuple[str, ...]
    """Texts that end a turn, tokens or not."""
    stops: tuple[str, ...]
    """Those of them that end a turn before further messages."""

    def end_at(self, text: str, start: int) -> int | None:
        """Return where a turn ends in a text, from ``start`` on; None if nothing ends it."""
        return min((at for end in self.ends if (at := text.find(end, start)) >= 0), default=None)


def find_layout(apply: Apply, inputs: TemplateInputs, special: Sequence[str]) -> TurnLayout:
    """Return the layout of a template's turns; ``special`` are the tokenizer's special tokens."""
    ask = [inputs.fields(ASK)]
    texts = (try_text(apply, ask, opener=True) or "", try_text(apply, ask) or "")
    opened, closed = (text.rpartition(ASK.content)[2] for text in texts)
    shared_end = shared_prefix([opened, closed])
    plain = Message("assistant", SAID)
    turns = [(plain, SAID), (replace(plain, content=REASONED), THOUGHT)]
    if inputs.max_calls:
        turns.append((replace(plain, content="", tool_calls=CALLS[:1]), CALLS[0].name))
    heads, ends, stops = [opened], dict[str, None](), dict[str, None]()
    for turn, first in turns:
        for new in ((), (MORE,), RESULTS[:1], (MORE, plain, MORE)):
            text = try_text(apply, map(inputs.fields, (ASK, turn, *new))) or ""
            head, marker, tail = text.rpartition(ASK.content)[2].partition(first)
            if not marker:
                continue
            heads.append(head)
            if turn is plain and (end := leading_end_token(tail.lstrip(), special)):
                ends[end] = None
                stops |= {end: None} if new else {}
    if inputs.max_calls and (end := _end_of_calls(apply, inputs, tuple(ends))):
        ends[end] = stops[end] = None
    start = shared_prefix(heads)[len(shared_end) :]
    return TurnLayout(start, opened[len(shared_end) + len(start) :], tuple(ends), tuple(stops))


def _end_of_calls(apply: Apply, inputs: TemplateInputs, ends: Sequence[str]) -> str:
    """Return what ends a turn of calls; empty if it is one of ``ends``."""
    turn, argument = Message("assistant", "", CALLS[:1]), str(CALLS[0].arguments["word"])
    texts = (try_text(apply, map(inputs.fields, (ASK, turn, *new))) or "" for new in ((), RESULTS[:1]))
    unanswered, answered = (text.rpartition(ASK.content)[2].partition(argument)[2] for text in texts)
    answered = answered.partition(RESULTS[0].content)[0]
    marks = MARKUP.findall(shared_prefix([unanswered, answered]))
    return "" if not marks or any(end in answered for end in ends) else marks[-1]


def leading_end_token(text: str, special: Sequence[str]) -> str:
    """Return the special token, or the string that looks like one, at the start of a text."""
    starts = [token for token in special if text.startswith(token)]
    markup = MARKUP.match(text)
    return max(starts, key=len) if starts else markup[0] if markup else ""


class SampledTurn:
    """A turn that the policy sampled, as a template may write it: with placeholders for reasoning, content and calls.

    Args:
        message: the turn; its content is what was sampled, calls included.
        inputs: form of messages of the template.
        markers: strings that may start a call.
        opened: whether the opener starts the reasoning.
        mark: character that occurs in no message.
        number: of the turn in the conversation.
    """

    def __init__(
        self, message: Message, inputs: TemplateInputs, markers: Sequence[str], opened: bool, mark: str, number: int
    ) -> None:
        self._sampled, self._inputs, self._markers = message.content, inputs, markers
        self._reasoning, self._said = inputs.split(message.content)
        self._after_reasoning = self._said
        self._open = opened and self._reasoning is None
        space = ""
        if self._reasoning is not None:  # white space between reasoning and content is left to the template
            space = self._said[: len(self._said) - len(self._said.lstrip())]
            self._said = self._said.lstrip()
        self._thought, self._content = f"{mark}{number}r{mark}", f"{mark}{number}c{mark}"
        structured = 0 < len(message.tool_calls) <= inputs.max_calls
        with_content = not structured or (inputs.content_before_calls and self._call_at(self._said) > 0)
        calls = [
            replace(call, arguments={"a": f"{mark}{number}a{index}{mark}"})
            for index, call in enumerate(message.tool_calls if structured else ())
        ]
        self._calls = tuple(str(call.arguments["a"]) for call in calls)
        self.fields: Fields = self._fields(message, space, self._content if with_content else "", calls)
        """The turn as the template reads it."""

    def _call_at(self, text: str) -> int:
        """Return where the first call starts in a text, or 0."""
        return min((at for marker in self._markers if (at := text.find(marker)) >= 0), default=0)

    def _fields(self, message: Message, space: str, content: str, calls: Sequence[ToolCall]) -> Fields:
        inputs, reasoning = self._inputs, self._reasoning
        if reasoning is None:
            return inputs.with_reasoning(message, None, content, calls)
        thought = self._thought if reasoning.strip() else ""
        if inputs.reasoning:
            return inputs.with_reasoning(message, thought, content, calls)
        return inputs.with_reasoning(message, None, f"{THINK}\n{thought}\n{THINK_END}{space}{content}", calls)

    def write(self, text: str, layout: TurnLayout, previous_end: int, *, keep: bool) -> tuple[str, int]:
        """Return a template's text with the sampled text in place of the placeholders, and where the turn ends in it.

        Args:
            text: what the template wrote.
            layout: of the template's turns.
            previous_end: end of the policy's previous turn.
            keep: keep reasoning that the template has left out.

        Raises:
            ValueError: the turn is not in the text, or not in one piece.
        """
        marks = (self._thought, self._content, *self._calls)
        positions = sorted(position for mark in marks if (position := text.find(mark, previous_end)) >= 0)
        if not positions or any(text.count(mark) > 1 for mark in marks):
            raise ValueError("the template leaves out earlier text of the policy, or repeats it")
        end = layout.end_at(text, positions[-1])
        if end is None:
            if not text.startswith(self._content, positions[-1]):
                raise ValueError("the template writes no end after a tool call")
            end = positions[-1] + len(self._content)
        start, has_opener = self._start(text, layout, previous_end, positions[0])
        # A turn that continues another one, such as after tool results, may have sampled the opening itself.
        opened = has_opener or not self._sampled.startswith(THINK)
        sampled = (layout.opened if opened else "") + self._sampled
        if self._keeps_all(text, text[start : positions[0]], sampled, keep=keep):
            head = text[:start] + sampled
        elif layout.start and layout.start in self._inputs.closing:  # what follows reasoning starts as a turn does
            head = text[:start] + self._inputs.closing.rpartition(layout.start)[2] + self._after_reasoning
        else:
            content_start = text.find(self._content)
            if content_start < 0:  # calls alone
                content_start = start + self._call_at(text[start:end])
            head = text[:content_start] + self._said
        return head + text[end:], len(head)

    def _start(self, text: str, layout: TurnLayout, previous_end: int, first: int) -> tuple[int, bool]:
        """Return where the turn starts whose ``first`` placeholder is known, and whether it has the opener of turns."""
        at = text.rfind(layout.start, previous_end, first) if layout.start else -1
        start = at + len(layout.start)
        if at >= 0 and layout.end_at(text[:first], start) is None:
            return start, True
        opening = f"{THINK}\n"  # the turn continues another one, or every turn starts otherwise
        start = first - len(opening) if text.endswith(opening, previous_end, first) else first
        return start, not layout.start

    def _keeps_all(self, text: str, head: str, sampled: str, *, keep: bool) -> bool:
        """Return whether the template writes all of the ``sampled`` turn, whose part before the first placeholder is ``head``."""
        if keep or self._open or not self._inputs.thinks:
            return keep or self._open or self._reasoning is None or self._thought in text
        if self._reasoning is None:
            return False  # what precedes the content is the template's
        if self._reasoning.strip():
            return self._thought in text
        # Templates may write <think></think> in place of reasoning that they leave out.
        return THINK_END in head and _thought(head) == _thought(sampled)


def _thought(text: str) -> str:
    """Return the text between ``<think>`` and ``</think>``."""
    return text.partition(THINK_END)[0].rpartition(THINK)[2]


def free_character(messages: Sequence[Message]) -> str:
    """Return a character that no message contains."""
    texts = [message.content for message in messages]
    return next(letter for letter in map(chr, _PRIVATE) if not any(letter in text for text in texts))
