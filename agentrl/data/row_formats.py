"""Conversions of rows that people have to what the keys of ``data`` and ``sft`` name: the built-in values of ``data.convert``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

RowValues = dict[str, Any]
"""The columns of a row."""

_MARK = "####"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of ShareGPT's ``from``, and of its dialects with tools."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


def gsm8k(row: RowValues) -> RowValues:
    """Return a row of GSM8K with what follows ``####`` in ``answer`` as its answer, and the whole text as ``solution``.

    Raises:
        ValueError: the answer has no ``####``, or nothing behind it.
    """
    solution = row.get("answer")
    answer = solution.rpartition(_MARK)[2].strip() if isinstance(solution, str) and _MARK in solution else ""
    if not answer:
        raise ValueError(f"the answer {solution!r:.80} has no number behind {_MARK}")
    return {**row, "answer": answer.replace(",", ""), "solution": solution}


def sharegpt(row: RowValues) -> RowValues:
    """Return a row of ShareGPT with ``messages`` in the format of OpenAI in place of ``conversations`` (``from``, ``value``).

    A column ``system`` becomes the first message. Calls are turns of ``function_call`` with JSON, or ``<tool_call>`` in the
    turns of the assistant; results are turns of ``tool``, ``observation`` or ``function_response``. A turn of the assistant keeps
    what says whether it is trained: its ``weight``, and ``train``, which is refused later.

    Raises:
        ValueError: it has no conversations, a turn has an unknown ``from``, or a call is no JSON.
    """
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"the row has no list conversations; it has the keys: {', '.join(row)}")
    messages: list[RowValues] = []
    if row.get("system"):
        messages.append({"role": "system", "content": row["system"]})
    for number, turn in enumerate(turns, 1):
        messages.extend(_messages_in(turn, number))
    other_columns = {name: value for name, value in row.items() if name not in ("conversations", "system")}
    return {**other_columns, "messages": messages}


def _messages_in(turn: object, number: int) -> Iterator[RowValues]:
    fields: Mapping[str, object] = turn if isinstance(turn, Mapping) else {}
    author, text = fields.get("from"), fields.get("value")
    if author not in _ROLES or not isinstance(text, str):
        raise ValueError(f"turn {number} is {turn!r:.80}; it must be {{from, value}}, from one of {', '.join(_ROLES)}")
    role = _ROLES[author]
    marks = {name: fields[name] for name in ("weight", "train") if name in fields and role == "assistant"}
    if author == "function_call":
        yield {"role": role, "content": "", "tool_calls": _calls([text], number), **marks}
    elif role == "assistant" and "<tool_call>" in text:
        content = _CALL.sub("", text).strip()
        yield {"role": role, "content": content, "tool_calls": _calls(_CALL.findall(text), number), **marks}
    elif role == "tool" and (responses := _RESPONSE.findall(text)):
        yield from ({"role": role, "content": response} for response in responses)
    else:
        yield {"role": role, "content": text, **marks}


def _calls(texts: list[str], number: int) -> list[RowValues]:
    calls = []
    for text in texts:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"turn {number} has the call {text!r:.80}, which is no JSON: {error}") from None
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                raise ValueError(f"turn {number} has the call {call!r:.80}; it must be {{name, arguments}}")
            calls.append({"function": {"name": call["name"], "arguments": call.get("arguments") or {}}})
    if not calls:
        raise ValueError(f"turn {number} has a <tool_call> that does not end")
    return calls


CONVERSIONS: Mapping[str, Callable[[RowValues], RowValues]] = {"gsm8k": gsm8k, "sharegpt": sharegpt}
"""By the name in ``data.convert``. None of them leaves out rows."""
