"""Turn transitions: how a template changes a turn of the policy when messages follow, and how agentrl continues."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from agentrl.core.errors import ConversationError, ModelError
from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, CallStatus, Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.base import Format
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.formats.template_inputs import shared_prefix
from agentrl.render.parsers.base import CallParser
from agentrl.render.probes import TOOLS
from agentrl.render.renderer import ChatRenderer

_ASK, _MORE, _WORDS, _THOUGHT = Message("user", "qa1"), Message("user", "qa2"), "as1", "re1"
_EARLIER = Message("assistant", "as0")
_REASONING = f"{_THOUGHT}\n{THINK_END}\n\n"
_IDS = ("call00001", "call00002")  # nine letters and digits, as Mistral's templates require
_CALLS = (ToolCall(_IDS[0], "look_up", {"word": "é"}), ToolCall(_IDS[1], "add", {"a": 1}))
_RESULTS = tuple(Message("tool", f"fo{number}", tool_call_id=call) for number, call in enumerate(_IDS))
_NEW: dict[str, tuple[Message, ...]] = {
    "a user message": (_MORE,),
    "a tool result": _RESULTS[:1],
    "two tool results": _RESULTS,
    "a system message": (Message("system", "sy1"),),
}
_SHOWN = 40
"""Characters of a difference that are shown."""
SPECIAL_TOKEN_LIKE = re.compile(r"<[|｜][^\s<>|｜]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]")
"""Strings in a template's text that look like special tokens."""


class Continuation(StrEnum):
    """How agentrl continues a conversation when messages follow a turn."""

    BRIDGE = "bridge"
    """It appends to the sampled tokens; the row continues."""
    KEEP = "keep"
    """The same, although the template would drop reasoning (``render.keep_thinking=true``)."""
    FORK = "fork"
    """It renders the conversation again, and a new row begins."""
    REFUSE = "refuse"
    """The format refuses the conversation; the episode ends with an error."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two texts."""

    shared: str
    """The last common characters."""
    was: str
    """Continuation of the first text: the prompt and the sampled turn."""
    is_now: str
    """Continuation of the second text: the template's text of the same messages now."""


@dataclass(frozen=True, slots=True)
class TurnTransition:
    """The transition of one kind of turn to one kind of next message."""

    turn: str
    """``plain``, ``reasoning`` or ``tool call``."""
    before: str
    """Kind of the next message, such as ``a user message``."""
    preserved: bool | None
    """Whether the template keeps prompt and turn unchanged; None if it refuses such a conversation."""
    stable: bool | None
    """Whether the template keeps its own text of prompt and turn. If the turn is not preserved although this holds, the
    template never writes the turn as it is sampled; otherwise the new messages cause the change."""
    difference: Difference | None
    """The first difference of sampled and written text, if the turn is not preserved."""
    drops_thinking: bool
    """Whether the template drops the reasoning."""
    continuation: Continuation
    """How agentrl continues."""
    reason: ForkReason | None
    """Reason of a fork, if there is one."""
    detail: str
    """Explanation of the fork or the refusal."""
    exact: bool | None
    """Whether the bridged text is the template's text; None without a bridge, or if it is not supposed to be."""
    verbatim: bool | None
    """Whether the turn stands in the conversation rendered again as it was sampled, in unusual white space too, with its
    reasoning or without it; None if the format refuses the conversation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn in the form in which the policy would sample it."""

    kind: str
    """``plain``, ``reasoning`` or ``tool call``."""
    body: str
    """Sampled text between the opener and the end token."""
    message: Message
    """What it says, in the words of no format."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Tool calls in the turn."""
        return self.message.tool_calls


class TemplateProbe:
    """Compares a renderer with the template that it represents, by probe conversations.

    Args:
        tokenizer: tokenizer of the policy.
        renderer: the renderer that agentrl uses.
        written: the template as a format; the renderer's format if ``render.format`` names one.
    """

    tools: Sequence[Tool] = TOOLS

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer, written: Format) -> None:
        self.renderer = renderer
        self.texts: list[str] = []
        """All texts that the template has written."""
        self.refusal = ""
        """Message of the last refusal of a conversation."""
        self._tokenizer = tokenizer
        self._written = written
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def opener(self) -> str:
        """Text before a turn of the policy; empty if the template refuses a single user message."""
        closed, opened = self.text((_ASK,), opener=False), self.text((_ASK,))
        return opened[len(closed) :] if closed and opened and opened.startswith(closed) else opened or ""

    @cached_property
    def begins(self) -> bool:
        """Whether the template writes a single user message."""
        return self.text((_ASK,)) is not None

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """End tokens after a turn: at the end, before a user message, and before a tool result."""
        texts = (self._text_after_words(()), self._text_after_words((_MORE,)), self._text_after_words(_RESULTS[:1]))
        return tuple(dict.fromkeys(end for text in texts if (end := self._leading_end_token(text))))

    @cached_property
    def text_after_end(self) -> str:
        """Text after the end token of the last turn."""
        text = self._text_after_words(())
        return text[len(end) :] if (end := self._leading_end_token(text)) else ""

    @property
    def thoughtless(self) -> str:
        """All texts of conversations without reasoning, so that ``<think>`` in them is the template's own."""
        return "".join(text for text in self.texts if _THOUGHT not in text)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The kinds of turns in this format. If the opener opens the reasoning, every turn has reasoning."""
        opens = self.renderer.format.opens_thinking
        thought = f"{THINK}\n{_REASONING}" if opens else ""
        turns = [] if opens else [self._turn("plain", Message("assistant", _WORDS))]
        turns.append(self._turn("reasoning", Message("assistant", f"{THINK}\n{_REASONING}{_WORDS}")))
        turns += [self._turn("tool call", Message("assistant", thought, calls)) for calls in (_CALLS[:1], _CALLS)]
        return tuple(turn for turn in turns if turn is not None)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opener: bool = True) -> str | None:
        """Return the template's text, or None if it refuses."""
        try:
            text = self._written.text(messages, tools, opener=opener)
        except (ValueError, ModelError) as error:
            self.refusal = str(error)
            return None
        self.texts.append(text)
        return text

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a template's text, with special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def reads(self, turn: Turn, parser: CallParser) -> bool:
        """Return whether a parser reads the calls of a turn."""
        calls = self.renderer.with_parser(parser).parse(self.ids(turn.body), self.tools).tool_calls
        read = [(call.name, call.arguments, call.status) for call in calls]
        return read == [(call.name, call.arguments, CallStatus.OK) for call in turn.calls]

    def find_transition(self, turn: Turn, next_kind: str) -> TurnTransition:
        """Return the transition of a turn to the next messages named ``next_kind``."""
        new = _NEW[next_kind]
        tools = self._tools(turn.calls, new)
        comparisons = [self._compare(context, turn, new, tools) for context in ((_ASK,), (_ASK, _EARLIER, _MORE))]
        preserved, difference = next((comparison for comparison in comparisons if not comparison[0]), comparisons[0])
        text_with_new = self.text((_ASK, turn.message, *new), tools)
        closed = self.text((_ASK, turn.message), tools, opener=False)
        stable = None if text_with_new is None or closed is None else text_with_new.startswith(closed)
        drops_thinking = _THOUGHT in turn.body and text_with_new is not None and _THOUGHT not in text_with_new
        continuation, reason, detail, bridged = self._continuation(turn, new, tools, text_with_new)
        if continuation is Continuation.BRIDGE and preserved is False:
            continuation = Continuation.KEEP
        exact = None
        if continuation is Continuation.BRIDGE and text_with_new is not None:
            exact = self.renderer.decode(bridged) == self.renderer.decode(self.ids(text_with_new))
        return TurnTransition(
            turn.kind,
            next_kind,
            preserved,
            stable,
            difference,
            drops_thinking,
            continuation,
            reason,
            detail,
            exact,
            self._verbatim(turn, new, tools),
        )

    def _compare(
        self, context: Sequence[Message], turn: Turn, new: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[bool | None, Difference | None]:
        """Return whether a turn after ``context`` stays unchanged, and the difference if not."""
        prompt = self.text(context, tools)
        text_with_new = self.text((*context, turn.message, *new), tools)
        if prompt is None or text_with_new is None:
            return None, None
        difference = _difference(prompt + turn.body, text_with_new)
        return difference is None, difference

    def _continuation(
        self, turn: Turn, new: Sequence[Message], tools: Sequence[Tool], text_with_new: str | None
    ) -> tuple[Continuation, ForkReason | None, str, tuple[int, ...]]:
        """Return how the renderer continues, the reason and its explanation, and the tokens of a row that continues."""
        renderer, ids = self.renderer, self.ids(turn.body) + self._sampled_end(turn.body, text_with_new)
        try:
            prompt = renderer.render((_ASK,), tools).token_ids
            history = (_ASK, self._parse_turn(turn, ids, tools, prompt))
            added = renderer.bridge(history, ids, new, tools)
            if isinstance(added, Fork):
                renderer.render((*history, *new), tools)
                return Continuation.FORK, added.reason, added.detail, ()
        except (ConversationError, ModelError) as error:
            return Continuation.REFUSE, None, str(error), ()
        return Continuation.BRIDGE, None, "", prompt + ids + added.token_ids

    def _verbatim(self, turn: Turn, new: Sequence[Message], tools: Sequence[Tool]) -> bool | None:
        """Return whether the turn, sampled with other white space, stays so in the conversation rendered again."""
        renderer, body = self.renderer, f"{turn.body} "
        for text, spaced in ((_WORDS, f" {_WORDS}  "), (THINK_END, f"  \n\n{THINK_END}"), ('": ', '" :  ')):
            body = body.replace(text, spaced)
        try:
            prompt = renderer.render((_ASK,), tools).token_ids
            message = self._parse_turn(turn, self.ids(body), tools, prompt)
            text = renderer.decode(renderer.render((_ASK, message, *new), tools).token_ids)
        except (ConversationError, ModelError):
            return None
        answer = message.content.rpartition(THINK_END)[2].lstrip()
        return message.content in text or answer[max(0, answer.find(f" {_WORDS}")) :].lstrip() in text

    def _parse_turn(self, turn: Turn, ids: Sequence[int], tools: Sequence[Tool], prompt: Sequence[int]) -> Message:
        """Return a sampled turn as an episode reads it: each call with its own id."""
        message = self.renderer.parse(ids, tools, prompt_ids=prompt)
        calls = zip(message.tool_calls, turn.calls, strict=False)
        return replace(message, tool_calls=tuple(replace(call, id=call_of_turn.id) for call, call_of_turn in calls))

    def _sampled_end(self, body: str, text_with_new: str | None) -> tuple[int, ...]:
        """Return the end token that a policy samples: the template's, or else the format's."""
        stops = self.renderer.end_token_ids
        written = (
            self._leading_end_token(text_with_new.rpartition(body)[2].lstrip())
            if text_with_new and body in text_with_new
            else ""
        )
        ids = self.ids(written)
        return ids if len(ids) == 1 and ids[0] in stops else stops[:1]

    def _turn(self, kind: str, message: Message) -> Turn | None:
        """Return a turn that the template preserves: with the plain content, or with the template's text of it."""
        content = message.content.removeprefix(f"{THINK}\n") if self.renderer.format.opens_thinking else message.content
        if isinstance(self._written, TemplateFormat) and not self._written.inputs.thinks:  # it has other markers
            inputs = self._written.inputs
            content = content.replace(THINK, inputs.opening).replace(f"{THINK_END}\n\n", inputs.closing)
        bodies = [body for body in (*((content,) if not message.tool_calls else ()), self._body(message)) if body]
        turns = [Turn(kind, body, message) for body in bodies]
        return next((turn for turn in turns if self._is_preserved(turn)), turns[-1] if turns else None)

    def _is_preserved(self, turn: Turn) -> bool:
        """Return whether the template preserves the turn before any kind of message."""
        return any(self._compare((_ASK,), turn, new, self._tools(turn.calls, new))[0] for new in _NEW.values())

    def _body(self, message: Message) -> str | None:
        """Return the template's text of a message between opener and end, or None if it is incomplete."""
        words = [call.name for call in message.tool_calls] or [_WORDS]
        words += [_THOUGHT] if _THOUGHT in message.content else []
        for new in (_RESULTS[: len(message.tool_calls) or 1], (_MORE,), ()):
            tools = self._tools(message.tool_calls, new)
            prompt, text_with_new = self.text((_ASK,), tools), self.text((_ASK, message, *new), tools)
            if prompt is None or text_with_new is None or not text_with_new.startswith(prompt):
                continue
            body = self._until_end(text_with_new[len(prompt) :])
            if all(word in body for word in words):
                return body
        return None

    def _tools(self, calls: Sequence[ToolCall], new: Sequence[Message]) -> Sequence[Tool]:
        return self.tools if calls or any(message.role == "tool" for message in new) else ()

    def _text_after_words(self, new: Sequence[Message]) -> str:
        tools = self._tools((), new)
        text = self.text((_ASK, Message("assistant", _WORDS), *new), tools, opener=bool(new))
        return text.partition(_WORDS)[2] if text else ""

    def _leading_end_token(self, text: str) -> str:
        """Return the special token, or the string that looks like one, at the start of a text."""
        starts = [token for token in self._special if text.startswith(token)]
        special_like = SPECIAL_TOKEN_LIKE.match(text)
        return max(starts, key=len) if starts else special_like[0] if special_like else ""

    def _until_end(self, text: str) -> str:
        stops = (*self.ends, *(self.renderer.decode((index,)) for index in self.renderer.end_token_ids))
        return text[: min((at for end in stops if (at := text.find(end)) >= 0), default=len(text))]


def find_transitions(probe: TemplateProbe) -> tuple[TurnTransition, ...]:
    """Return the transitions of every kind of turn to every kind of next message."""
    if not probe.begins:
        return ()
    pairs = ((turn, next_kind) for turn in probe.turns for next_kind, new in _NEW.items() if _matches_calls(turn, new))
    return tuple(probe.find_transition(turn, next_kind) for turn, next_kind in pairs)


def _matches_calls(turn: Turn, new: Sequence[Message]) -> bool:
    """Return whether new messages fit a turn: as many as its calls, if it has calls."""
    return not turn.calls or len(turn.calls) == len(new)


def _difference(was: str, is_now: str) -> Difference | None:
    """Return the first difference of ``is_now`` from ``was``; None if it starts with ``was``."""
    if is_now.startswith(was):
        return None
    at = len(shared_prefix([was, is_now]))
    return Difference(was[max(0, at - _SHOWN // 2) : at], was[at : at + _SHOWN], is_now[at : at + _SHOWN])
