"""What a chat template writes between two turns of the policy, and the proof that it leaves earlier turns alone."""

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
"""What is said after an opener that ends with ``<think>``."""
_OPENED_EMPTY = "\n</think>\n\nas1"


@dataclass(frozen=True, slots=True)
class Proof:
    """What dummy conversations show of a template, for new messages of certain roles."""

    preserves: bool
    """Earlier turns stay as they were, whatever their number."""
    preserves_reasoning: bool
    """They do even where they hold a ``<think>`` block, which many templates drop."""
    preserves_empty_thoughts: bool
    """They do even where that block is empty, which some templates drop sooner."""


def prove(render: Render, roles: Sequence[str], tools: Sequence[Tool], *, opened: bool = False) -> Proof:
    """Return what holds when messages of ``roles`` follow a turn of the policy.

    Where the opener has ``opened`` the reasoning, no turn is without it: what is proven is proven of such turns.
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
    """Return the template's text from the end of the policy's turn to the opener of its next, ``new`` between them.

    None where the template refuses such a conversation or changes the turn before.
    """
    return _suffix(render, _ASK, _OPENED if opened else _SAID, new, tools)


def text_after_reasoning(render: Render, new: Sequence[Message], tools: Sequence[Tool]) -> str | None:
    """Return what the template writes after a turn with reasoning, whether or not it leaves that reasoning out.

    None where it refuses the conversation, or writes something else after a second such turn.
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
    # A second and third turn show that the boundary depends neither on the position nor on what went before.
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
    except (jinja2.TemplateError, TypeError, ValueError):  # how templates say that they know no such conversation
        return None
    return whole[len(prefix) :] if whole.startswith(prefix) else None
