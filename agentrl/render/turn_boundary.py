"""The text that a chat template writes between two turns of the policy, and the proof that earlier turns stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2

from agentrl.core.tool import Tool
from agentrl.core.types import Message

Render = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""``render(messages, tools, opener)``: the template's text."""

_ASK = (Message("user", "qa1"),)
_SAID = "as1"
_REASONED = "<think>\nre1\n</think>\n\nas1"
_EMPTY = "<think>\n\n</think>\n\nas1"
_OPENED = "re1\n</think>\n\nas1"
"""Content of a turn whose opener ends with ``<think>``."""
_OPENED_EMPTY = "\n</think>\n\nas1"


@dataclass(frozen=True, slots=True)
class Proof:
    """Properties of a template for new messages of certain roles, shown by probe conversations."""

    preserves: bool
    """Earlier turns stay unchanged, independent of their number."""
    preserves_reasoning: bool
    """Also turns with a ``<think>`` block, which many templates drop."""
    preserves_empty_thoughts: bool
    """Also turns with an empty ``<think>`` block, which some templates drop earlier."""


def prove(render: Render, roles: Sequence[str], tools: Sequence[Tool], *, opened: bool = False) -> Proof:
    """Return the properties of a template when messages of ``roles`` follow a turn of the policy.

    If the opener has ``opened`` the reasoning, every turn has reasoning, and the proof is about such turns.
    """
    new = tuple(Message(role, f"nw{number}", tool_call_id="c1" if role == "tool" else None)  # type: ignore[arg-type]
                for number, role in enumerate(roles))  # fmt: skip
    if opened:
        after = text_after_reasoning(render, new, tools) is not None
        reasoned, empty = (after and _preserves(render, said, new, tools) for said in (_OPENED, _OPENED_EMPTY))
        return Proof(after, reasoned, empty)
    plain = _preserves(render, _SAID, new, tools)
    reasoned, empty = (plain and _preserves(render, said, new, tools) for said in (_REASONED, _EMPTY))
    return Proof(plain, reasoned, empty)


def boundary_text(render: Render, new: Sequence[Message], tools: Sequence[Tool], *, opened: bool = False) -> str | None:
    """Return the template's text from the end of the policy's turn to its next opener, with ``new`` messages between them.

    None if the template refuses such a conversation or changes the turn before.
    """
    return _suffix(render, _ASK, _OPENED if opened else _SAID, new, tools)


def text_after_reasoning(render: Render, new: Sequence[Message], tools: Sequence[Tool]) -> str | None:
    """Return the text that the template writes after a turn with reasoning, whether or not it drops that reasoning.

    None if it refuses the conversation, or writes another text after a second such turn.
    """
    said = Message("assistant", _OPENED)
    tails = set[str]()
    for before in (_ASK, (*_ASK, said, *new)):
        try:
            whole = render((*before, said, *new), tools, True)
        except (jinja2.TemplateError, TypeError, ValueError):
            return None
        _, there, tail = whole.rpartition(_SAID)
        if not there:
            return None
        tails.add(tail)
    return tails.pop() if len(tails) == 1 else None


def _preserves(render: Render, said: str, new: Sequence[Message], tools: Sequence[Tool]) -> bool:
    first = _suffix(render, _ASK, said, new, tools)
    if first is None:
        return False
    # A second and third turn show that the boundary depends neither on the position nor on earlier turns.
    earlier = (*_ASK, Message("assistant", said), *new)
    second = _suffix(render, earlier, said, new, tools)
    last = said if said in (_OPENED, _OPENED_EMPTY) else _SAID
    third = _suffix(render, (*earlier, Message("assistant", said), *new), last, new, tools)
    return first == second == third


def _suffix(
    render: Render, before: Sequence[Message], said: str, new: Sequence[Message], tools: Sequence[Tool]
) -> str | None:
    try:
        prefix = render(before, tools, True) + said
        whole = render((*before, Message("assistant", said), *new), tools, True)
    except (jinja2.TemplateError, TypeError, ValueError):  # raised by templates that refuse a conversation
        return None
    return whole[len(prefix) :] if whole.startswith(prefix) else None
