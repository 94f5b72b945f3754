"""The text that a chat template writes between two turns of the policy, and the proof that earlier turns stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Message, ToolCall
from agentrl.render.formats.sampled_turns import TurnLayout
from agentrl.render.formats.template_inputs import ASK, SAID, THOUGHT

Render = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""``render(messages, tools, opener)``: the template's text; ValueError if it refuses them."""


class Reasoning(StrEnum):
    """Reasoning of a turn."""

    NONE = "none"
    """There is none."""
    EMPTY = "empty"
    """It is closed, and has no text."""
    SOME = "some"
    """It is closed."""
    OPEN = "open"
    """It is not closed: the turn ended within it."""


@dataclass(frozen=True, slots=True)
class TurnKind:
    """What a template may write differently from one turn of the policy to another."""

    reasoning: Reasoning = Reasoning.NONE
    """Its reasoning."""
    calls: tuple[tuple[str, str], ...] = ()
    """Id and name of each call."""

    def message(self) -> Message:
        """Return a probe turn of this kind."""
        content = "" if self.calls else SAID  # as in `SampledTurn`
        thought = {Reasoning.EMPTY: "", Reasoning.SOME: THOUGHT}.get(self.reasoning)
        if thought is not None:
            content = f"{THINK}\n{thought}\n{THINK_END}\n\n{content}"
        calls = [ToolCall(id, name, {"word": f"ar{number}"}) for number, (id, name) in enumerate(self.calls)]
        return Message("assistant", content, tuple(calls))

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of `message`, in the order in which the policy samples them."""
        thought = (THOUGHT,) if self.reasoning is Reasoning.SOME else ()
        return (*thought, *(f"ar{number}" for number in range(len(self.calls))), *(() if self.calls else (SAID,)))

    @property
    def closed(self) -> TurnKind:
        """The same turn with its reasoning closed."""
        return replace(self, reasoning=Reasoning.SOME) if self.reasoning is Reasoning.OPEN else self

    @property
    def unnamed(self) -> TurnKind:
        """The same turn with other ids and names of calls."""
        return replace(self, calls=tuple((f"call0000{number}", "look_up") for number in range(len(self.calls))))

    @property
    def plain(self) -> TurnKind:
        """The same turn without reasoning."""
        return replace(self, reasoning=Reasoning.NONE)


@dataclass(frozen=True, slots=True)
class BoundaryProbe:
    """Finds the text after turns of a template in probe conversations.

    Args:
        render: the template.
        layout: of its turns.
        opening: text that starts reasoning.
    """

    render: Render
    layout: TurnLayout
    opening: str

    def preserves(self, kind: TurnKind, roles: Sequence[str], tools: Sequence[Tool]) -> bool:
        """Return whether turns of a kind stay unchanged when messages of ``roles``, and only those, follow each of them.

        A second and third turn show that the text after a turn depends neither on its position nor on earlier turns.
        """
        new = probe_messages(kind, roles)
        step, earlier = (kind.message(), *new), [ASK]
        texts = set[str | None]()
        for _ in range(3):
            texts.add(self.text_after_turn(earlier, kind, new, tools))
            earlier = [*earlier, *step]
        text = texts.pop()
        return not texts and text is not None and all(message.content in text for message in new)

    def text_after_turn(
        self, earlier: Sequence[Message], kind: TurnKind, new: Sequence[Message], tools: Sequence[Tool]
    ) -> str | None:
        """Return the text from the end of a turn after ``earlier`` to the next opener, with ``new`` messages between them.

        None if the template refuses the conversation, changes what was before, or writes the turn otherwise than as it is
        sampled.
        """
        try:
            prompt = self.render(earlier, tools, True)
            conversation_text = self.render((*earlier, kind.message(), *new), tools, True)
        except ValueError:
            return None
        if not conversation_text.startswith(prompt):
            return None
        text_after = conversation_text[len(prompt) :]
        end = self._end(text_after, kind)
        thought = text_after[: text_after.find(kind.texts[0])]
        closed = kind.reasoning is not Reasoning.EMPTY or THINK_END in thought
        added = kind.reasoning is Reasoning.NONE and bool(self.opening) and self.opening in thought
        return None if end is None or added or not closed else text_after[end:]

    def only_appends(self, kind: TurnKind, roles: Sequence[str], tools: Sequence[Tool]) -> bool:
        """Return whether messages of ``roles`` are all written after a turn, and change nothing before it."""
        new = probe_messages(kind, roles)
        try:
            prompt = self.render((ASK,), tools, True)
            conversation_text = self.render((ASK, kind.message(), *new), tools, True)
        except ValueError:
            return False
        before = prompt.removesuffix(self.layout.start + self.layout.opened)
        text_after = self.text_after_reasoning(kind, new, tools)
        return (
            text_after is not None
            and conversation_text.startswith(before)
            and all(message.content in text_after for message in new)
        )

    def text_after_reasoning(self, kind: TurnKind, new: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        """Return the text after a turn whether or not the template drops its reasoning.

        None if the template refuses the conversation, or writes another text after a second such turn.
        """
        plain, step = kind.plain, (kind.message(), *new)
        tails = set[str]()
        for earlier in ((ASK,), (ASK, *step)):
            try:
                conversation_text = self.render((*earlier, *step), tools, True)
            except ValueError:
                return None
            at = conversation_text.rfind(plain.texts[0])
            end = self._end(conversation_text[at:], plain) if at >= 0 else None
            if end is None:
                return None
            tails.add(conversation_text[at + end :])
        return tails.pop() if len(tails) == 1 else None

    def _end(self, text: str, kind: TurnKind) -> int | None:
        """Return where a turn ends that starts in ``text``; None if one of its texts is missing."""
        at = 0
        for text_of_turn in kind.texts:
            start = text.find(text_of_turn, at)
            if start < 0:
                return None
            at = start + len(text_of_turn)
        end = self.layout.end_at(text, at)
        if end is None:
            return None if kind.calls else at
        return end


def probe_messages(kind: TurnKind, roles: Sequence[str]) -> tuple[Message, ...]:
    """Return messages of ``roles`` that follow a turn of a kind; tool results answer its calls in order."""
    ids = iter([id for id, _ in kind.calls])
    return tuple(
        Message(role, f"nw{number}x", tool_call_id=next(ids, "c1") if role == "tool" else None)  # type: ignore[arg-type]
        for number, role in enumerate(roles)
    )
