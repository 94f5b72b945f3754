"""The text of a turn that a policy did not sample, as it would sample it: for supervised fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Message
from agentrl.render.formats.base import Format, split_thinking
from agentrl.render.formats.template import TemplateFormat

_THOUGHT_OF_OPENER = re.compile(rf"({THINK}\s*)?({THINK_END}\s*)?\Z")
_LINE_END = "\n"


def turn_body(format: Format, history: Sequence[Message], turn: Message, tools: Sequence[Tool]) -> str:
    """Return the text of ``turn`` after the prompt of ``history``, with what the format writes after a last turn.

    Reasoning that the format leaves out of turns that are not sampled is written all the same, in ``<think>``.

    Raises:
        ValueError: the format refuses the turn, or writes it otherwise than after the opener of a turn.
    """
    prompt, text = format.text(history, tools), format.text((*history, turn), tools, opener=False)
    opener = _THOUGHT_OF_OPENER.search(prompt)
    assert opener is not None, "it matches nothing too"
    is_opened, is_closed = opener[1] is not None, opener[2] is not None
    reasoning, _ = split_thinking(turn.content)
    last = history[-1].content
    body = _text_after(prompt, text, last)
    if body is None:
        body = _text_after(prompt[: opener.start()], text, last)
        if body is None:
            raise ValueError("it writes the message otherwise than after the opener of a turn")
        if body.startswith(THINK):
            body = (body.partition(THINK_END)[2] if is_closed else body.removeprefix(THINK)).lstrip("\n")
        elif is_opened and not is_closed:
            return f"{reasoning}\n{THINK_END}\n\n{body.lstrip(_LINE_END)}"
    if reasoning.strip() in body:
        return body
    if is_closed:
        raise ValueError("the message has reasoning, and the opener of turns has closed it (render.thinking)")
    if isinstance(format, TemplateFormat) and not format.inputs.thinks:
        raise ValueError("it leaves out the reasoning of the message")
    return f"{THINK}\n{reasoning}\n{THINK_END}\n\n{body.lstrip(_LINE_END)}"


def _text_after(prompt: str, text: str, last: str) -> str | None:
    """Return what follows a prompt in a text; None if it is not there.

    Before its end, from the content of its ``last`` message on, it may be another one: some templates leave the reasoning of
    calls out once there is an answer.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    end_of_prompt = prompt[prompt.rfind(last) :]
    at = text.rfind(end_of_prompt) if last else -1
    return text[at + len(end_of_prompt) :] if at >= 0 else None


def split_end(body: str, ends: Collection[str], special: Collection[str]) -> tuple[str, str]:
    """Return a turn's text before its end token, and that token; empty if none of ``ends`` ends it.

    The token is the first of ``ends`` among the ``special`` tokens at the end of the text: there a policy stops.

    Raises:
        ValueError: there are special tokens, and none of them is an end.
    """
    text, end, at = body.rstrip(), "", 0
    while token := max((token for token in special if text.endswith(token)), key=len, default=""):
        text = text.removesuffix(token)
        if token in ends:
            end, at = token, len(text)
        text = text.rstrip()
    if not end and len(text) < len(body.rstrip()):
        raise ValueError(f"it ends a turn with {body.rstrip()[len(text) :]!r}, at which engines do not stop")
    return (body[:at], end) if end else (body, "")
