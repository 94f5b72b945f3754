"""Messages and tools in the format of OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import Any

from agentrl.core.chat_endpoint import WireMessage
from agentrl.core.images import IMAGE_MARK
from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, CallStatus, Message, ToolCall, json_state

Json = dict[str, Any]


def message_to_wire(message: Message, call_ids: Collection[str]) -> Json:
    """Return a message as a chat completion has it.

    Reasoning at the start of an assistant's message is in ``reasoning_content``. What continues a turn of the policy
    (``inline``), and the result of a call that no message makes, is a message of the user: the API has neither.

    Args:
        message: to convert.
        call_ids: of the calls that the conversation has made.
    """
    if message.role == "assistant":
        return _assistant_to_wire(message)
    if message.role == "tool" and not message.inline and message.tool_call_id in call_ids:
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": content_to_wire(message)}
    role = "user" if message.inline or message.role == "tool" else message.role
    return {"role": role, "content": content_to_wire(message)}


def content_to_wire(message: Message) -> str | list[Json]:
    """Return the content of a message: its text, or with images parts of the types ``text`` and ``image_url``."""
    if not message.images:
        return message.content
    parts = list[Json]()
    for text, image in zip_longest(message.content.split(IMAGE_MARK), message.images):
        if text:
            parts.append({"type": "text", "text": text})
        if image is not None:
            parts.append({"type": "image_url", "image_url": {"url": image.data_url}})
    return parts


def conversation_to_wire(messages: Sequence[Message]) -> list[Json]:
    """Return a whole conversation; see `message_to_wire`."""
    wires, call_ids = list[Json](), set[str]()
    for message in messages:
        wires.append(message_to_wire(message, call_ids))
        call_ids.update(call.id for call in message.tool_calls)
    return wires


def _assistant_to_wire(message: Message) -> Json:
    reasoning, text = split_reasoning(message.content)
    wire: Json = {"role": "assistant", "content": text if text or not message.tool_calls else None}
    if reasoning:
        wire["reasoning_content"] = reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(json_state(call.arguments), ensure_ascii=False),
                },
            }
            for call in message.tool_calls
        ]
    return wire


def with_reasoning(reasoning: str, text: str) -> str:
    """Return the text of a turn with its reasoning, as the policy's turns have it."""
    return f"{THINK}\n{reasoning.strip()}\n{THINK_END}\n\n{text}" if reasoning.strip() else text


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning at the start of a turn, and what follows it; without a whole one the reasoning is empty."""
    if not text.startswith(THINK) or THINK_END not in text:
        return "", text
    reasoning, _, after = text.removeprefix(THINK).partition(THINK_END)
    return reasoning.strip("\n"), after.lstrip("\n")


def tool_to_wire(tool: Tool) -> Json:
    """Return a tool as a chat completion has it."""
    function = {"name": tool.name, "description": tool.description, "parameters": json_state(tool.parameters)}
    return {"type": "function", "function": function}


def call_from_wire(wire: WireMessage) -> ToolCall:
    """Return a call of a reply; one whose arguments are no JSON object has a fault.

    Raises:
        KeyError, TypeError: it is no call of a function.
    """
    function = wire["function"]
    id, name, arguments = wire.get("id"), function["name"], function.get("arguments")
    if not isinstance(id, str | None) or not isinstance(name, str):
        raise TypeError(f"the call {wire!r:.100} has no name, or an id that is no text")
    value: Any = arguments
    if isinstance(arguments, str) or arguments is None:
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            fault = f"the arguments of {name} are no JSON: {error}: {arguments!r:.200}"
            return ToolCall(id or "", name, {}, CallStatus.INVALID_JSON, fault)
    if not isinstance(value, dict):
        fault = f"the arguments of {name} are no JSON object: {value!r:.200}"
        return ToolCall(id or "", name, {}, CallStatus.INVALID_JSON, fault)
    return ToolCall(id or "", name, value)


def reply_to_wire(reply: WireMessage, text: str, calls: Sequence[ToolCall], reasoning_fields: Sequence[str]) -> Json:
    """Return a turn as it is sent back: calls and reasoning as the endpoint wrote them.

    Args:
        reply: the endpoint's message.
        text: of the turn, as far as it counts.
        calls: those of the reply, or none if they do not count.
        reasoning_fields: fields of the reply that are sent back.
    """
    wire: Json = {"role": "assistant", "content": text if text or not calls else None}
    wire |= {name: reply[name] for name in reasoning_fields if reply.get(name)}
    for call, written in zip(calls, reply.get("tool_calls") or (), strict=False):
        arguments = written["function"].get("arguments") if call.is_readable else None
        sent = {name: value for name, value in written.items() if name != "index"}  # signatures, too
        sent |= {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments or "{}"}}
        wire.setdefault("tool_calls", []).append(sent)
    return wire
