"""What becomes of a turn of the policy once messages follow: the cases that the template check goes through."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.tool import Tool
from agentrl.core.types import CallStatus, Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.base import Format
from agentrl.render.parsers.base import THINK, THINK_END, CallParser
from agentrl.render.probe_conversations import TOOLS
from agentrl.render.renderer import ChatRenderer

_ASK, _MORE, _WORDS, _THOUGHT = Message("user", "qa1"), Message("user", "qa2"), "as1", "re1"
_EARLIER = Message("assistant", "as0")
_REASONING = f"{_THOUGHT}\n{THINK_END}\n\n"
_IDS = ("call00001", "call00002")  # nine letters and digits, as Mistral's templates insist on
_CALLS = (ToolCall(_IDS[0], "look_up", {"word": "é"}), ToolCall(_IDS[1], "add", {"a": 1}))
_RESULTS = tuple(Message("tool", f"fo{number}", tool_call_id=call) for number, call in enumerate(_IDS))
_NEW: dict[str, tuple[Message, ...]] = {
    "a user message": (_MORE,),
    "a tool result": _RESULTS[:1],
    "two tool results": _RESULTS,
    "a system message": (Message("system", "sy1"),),
}
_SHOWN = 40
"""Characters of a difference to show."""
MARKER = re.compile(r"<[|｜][^\s<>|｜]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]")
"""What looks like a token of its own in what templates write."""


class Outcome(StrEnum):
    """What agentrl does where messages follow a turn."""

    BRIDGE = "bridge"
    """It appends to what was sampled; the row goes on."""
    KEEP = "keep"
    """The same, where the template would leave reasoning out (``render.keep_thinking=true``)."""
    FORK = "fork"
    """It renders the conversation anew, and a new row begins."""
    REFUSE = "refuse"
    """The format has no such conversation; the episode ends with an error."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two texts part."""

    shared: str
    """The last characters that both have."""
    was: str
    """How the first goes on: the prompt and what the policy sampled."""
    is_now: str
    """How the second goes on: what the template makes of the same messages now."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """What becomes of one kind of turn before one kind of message."""

    turn: str
    """``plain``, ``reasoning`` or ``tool call``."""
    before: str
    """What follows, such as ``a user message``."""
    preserved: bool | None
    """Whether the template leaves prompt and turn as they were; None where it refuses such a conversation."""
    stable: bool | None
    """Whether it leaves its own words of them as they were: where nothing is preserved and this holds, it never writes the
    turn as it is sampled; otherwise the new messages make it change."""
    difference: Difference | None
    """The first one between what was sampled and what it writes, where the turn is not preserved."""
    drops_thinking: bool
    """Whether the reasoning is gone from what it writes."""
    outcome: Outcome
    """What agentrl does."""
    reason: ForkReason | None
    """Why it forks, where it does."""
    detail: str
    """The same in words, or the refusal."""
    exact: bool | None
    """Whether the bridged text is what the template writes; None where there is no bridge or it is not meant to be."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn as the policy would sample it."""

    kind: str
    """``plain``, ``reasoning`` or ``tool call``."""
    body: str
    """What is sampled between the opener and the end token."""
    calls: tuple[ToolCall, ...] = ()
    """Those that it makes."""


class Scene:
    """A renderer beside the template that it stands for, and what that template writes.

    Args:
        tokenizer: the policy's.
        renderer: what agentrl takes.
        written: writes what the template does; the renderer's own format where that was chosen by hand.
    """

    tools: Sequence[Tool] = TOOLS

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: ChatRenderer, written: Format) -> None:
        self.renderer = renderer
        self.texts: list[str] = []
        """All that the template wrote so far."""
        self.refusal = ""
        """Its words where it refused a conversation, the last time."""
        self._tokenizer = tokenizer
        self._written = written
        self._special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]

    @cached_property
    def opener(self) -> str:
        """What asks the policy to speak; empty where the template refuses even one question."""
        closed, opened = self.text((_ASK,), opener=False), self.text((_ASK,))
        return opened[len(closed) :] if closed and opened and opened.startswith(closed) else opened or ""

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """What the template puts behind the policy's words: before a user message, before a result, and at the end."""
        behind = (self._behind(()), self._behind((_MORE,)), self._behind(_RESULTS[:1]))
        return tuple(dict.fromkeys(end for text in behind if (end := self._end_of(text))))

    @cached_property
    def after(self) -> str:
        """What it writes behind the end token of the last turn."""
        text = self._behind(())
        return text[len(end) :] if (end := self._end_of(text)) else ""

    @property
    def thoughtless(self) -> str:
        """What the template says itself: all that it wrote of turns without reasoning."""
        return "".join(text for text in self.texts if _THOUGHT not in text)

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The kinds of turn that a policy has in this format. One whose opener opens a thought always reasons."""
        opens = self.renderer.format.opens_thinking
        thought = f"{THINK}\n{_REASONING}" if opens else ""
        found = [] if opens else [self._turn("plain", Message("assistant", _WORDS))]
        found.append(self._turn("reasoning", Message("assistant", f"{THINK}\n{_REASONING}{_WORDS}")))
        found += [self._turn("tool call", Message("assistant", thought, calls)) for calls in (_CALLS[:1], _CALLS)]
        return tuple(turn for turn in found if turn is not None)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opener: bool = True) -> str | None:
        """Return what the template writes, None where it refuses."""
        try:
            text = self._written.text(messages, tools, opener=opener)
        except (ValueError, ModelError) as error:
            self.refusal = str(error)
            return None
        self.texts.append(text)
        return text

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text of the template, special ones included."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def reads(self, turn: Turn, parser: CallParser) -> bool:
        """Return whether a parser reads the calls of a turn."""
        renderer = ChatRenderer(self._tokenizer, self.renderer.format, parser)
        calls = renderer.parse(self.ids(turn.body), self.tools).tool_calls
        read = [(call.name, call.arguments, call.status) for call in calls]
        return read == [(call.name, call.arguments, CallStatus.OK) for call in turn.calls]

    def cross(self, turn: Turn, before: str) -> Crossing:
        """Return what becomes of a turn before the messages that ``before`` names."""
        new = _NEW[before]
        tools = self._tools(turn.calls, new)
        looks = [self._look(context, turn.body, new, tools) for context in ((_ASK,), (_ASK, _EARLIER, _MORE))]
        preserved, difference = next((look for look in looks if not look[0]), looks[0])
        whole = self.text((_ASK, self._said(turn.body), *new), tools)
        closed = self.text((_ASK, self._said(turn.body)), tools, opener=False)
        stable = None if whole is None or closed is None else whole.startswith(closed)
        drops = _THOUGHT in turn.body and whole is not None and _THOUGHT not in whole
        outcome, reason, detail, bridged = self._outcome(turn, new, tools, whole)
        if outcome is Outcome.BRIDGE and preserved is False:
            outcome = Outcome.KEEP
        exact = None
        if outcome is Outcome.BRIDGE and whole is not None:
            exact = self.renderer.decode(bridged) == self.renderer.decode(self.ids(whole))
        return Crossing(turn.kind, before, preserved, stable, difference, drops, outcome, reason, detail, exact)

    def _said(self, body: str) -> Message:
        return Message("assistant", body, token_ids=self.ids(body))

    def _look(
        self, context: Sequence[Message], body: str, new: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[bool | None, Difference | None]:
        """Return whether a turn after ``context`` stays as it was, and where not."""
        prompt = self.text(context, tools)
        whole = self.text((*context, self._said(body), *new), tools)
        if prompt is None or whole is None:
            return None, None
        difference = _difference(prompt + body, whole)
        return difference is None, difference

    def _outcome(
        self, turn: Turn, new: Sequence[Message], tools: Sequence[Tool], whole: str | None
    ) -> tuple[Outcome, ForkReason | None, str, tuple[int, ...]]:
        """Return what the renderer makes of it, why, and the tokens of the row that goes on."""
        renderer, ids = self.renderer, self.ids(turn.body) + self._sampled_end(turn.body, whole)
        try:
            prompt = renderer.render((_ASK,), tools).token_ids
            history = (_ASK, renderer.parse(ids, tools, prompt_ids=prompt))
            added = renderer.bridge(history, ids, new, tools)
            if isinstance(added, Fork):
                renderer.render((*history, *new), tools)
                return Outcome.FORK, added.reason, added.detail, ()
        except (ConfigError, ModelError) as error:
            return Outcome.REFUSE, None, str(error), ()
        return Outcome.BRIDGE, None, "", prompt + ids + added

    def _sampled_end(self, body: str, whole: str | None) -> tuple[int, ...]:
        """Return the end token that a policy samples there: the template's, or else the format's."""
        stops = self.renderer.end_token_ids
        written = self._end_of(whole.rpartition(body)[2]) if whole and body in whole else ""
        ids = self.ids(written)
        return ids if len(ids) == 1 and ids[0] in stops else stops[:1]

    def _turn(self, kind: str, message: Message) -> Turn | None:
        """Return a turn as it can be sampled and given back: the plain words, or what the template makes of them."""
        said = message.content.removeprefix(f"{THINK}\n") if self.renderer.format.opens_thinking else message.content
        bodies = [body for body in (*((said,) if not message.tool_calls else ()), self._body(message)) if body]
        turns = [Turn(kind, body, message.tool_calls) for body in bodies]
        return next((turn for turn in turns if self._comes_back(turn)), turns[-1] if turns else None)

    def _comes_back(self, turn: Turn) -> bool:
        """Return whether the template leaves the turn alone before any message at all."""
        return any(self._look((_ASK,), turn.body, new, self._tools(turn.calls, new))[0] for new in _NEW.values())

    def _body(self, message: Message) -> str | None:
        """Return what the template writes of a message between opener and end, where it does not leave it out."""
        words = [call.name for call in message.tool_calls] or [_WORDS]
        words += [_THOUGHT] if _THOUGHT in message.content else []
        for new in (_RESULTS[: len(message.tool_calls) or 1], (_MORE,), ()):
            tools = self._tools(message.tool_calls, new)
            prompt, whole = self.text((_ASK,), tools), self.text((_ASK, message, *new), tools)
            if prompt is None or whole is None or not whole.startswith(prompt):
                continue
            body = self._until_end(whole[len(prompt) :])
            if all(word in body for word in words):
                return body
        return None

    def _tools(self, calls: Sequence[ToolCall], new: Sequence[Message]) -> Sequence[Tool]:
        return self.tools if calls or any(message.role == "tool" for message in new) else ()

    def _behind(self, new: Sequence[Message]) -> str:
        """Return what follows the policy's words."""
        tools = self._tools((), new)
        text = self.text((_ASK, Message("assistant", _WORDS), *new), tools, opener=bool(new))
        return text.partition(_WORDS)[2] if text else ""

    def _end_of(self, text: str) -> str:
        """Return the marker that text starts with: a special token, or what looks like one."""
        starts = [token for token in self._special if text.startswith(token)]
        looks = MARKER.match(text)
        return max(starts, key=len) if starts else looks[0] if looks else ""

    def _until_end(self, text: str) -> str:
        stops = (*self.ends, *(self.renderer.decode((index,)) for index in self.renderer.end_token_ids))
        return text[: min((at for end in stops if (at := text.find(end)) >= 0), default=len(text))]


def cross_all(scene: Scene) -> tuple[Crossing, ...]:
    """Return what becomes of every kind of turn before every kind of message."""
    if not scene.opener:
        return ()
    pairs = ((turn, before) for turn in scene.turns for before, new in _NEW.items() if _goes_with(turn, new))
    return tuple(scene.cross(turn, before) for turn, before in pairs)


def _goes_with(turn: Turn, new: Sequence[Message]) -> bool:
    """Return whether there are as many results as calls: two results follow two calls, all else one."""
    return not turn.calls or len(turn.calls) == len(new)


def _difference(was: str, is_now: str) -> Difference | None:
    """Return where ``is_now`` does not go on as ``was``; None where it starts with it."""
    if is_now.startswith(was):
        return None
    at = next((at for at, (one, other) in enumerate(zip(was, is_now, strict=False)) if one != other), len(is_now))
    return Difference(was[max(0, at - _SHOWN // 2) : at], was[at : at + _SHOWN], is_now[at : at + _SHOWN])
