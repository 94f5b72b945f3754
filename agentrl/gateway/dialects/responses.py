"""OpenAI's ``POST /v1/responses``, without state at the server: every request has the whole conversation."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, Literal

from msgspec import Struct
from typing_extensions import override

from agentrl.core.images import Image
from agentrl.core.types import Message, Role, ToolCall
from agentrl.gateway.dialects.base import (
    BadRequestError,
    ChatRequest,
    Dialect,
    Json,
    OpenAiErrors,
    Reply,
    assistant_message,
    call_turn,
    check_conversation,
    check_tool_names,
    convert,
    event,
    hosted_tools,
    make_call,
    make_tool,
    message_of_pieces,
    read_image,
    read_max_tokens,
    read_sampling,
    read_tool_choice,
    refuse_fields,
)

_SAMPLING = ("temperature", "top_p")
_REFUSED = ("previous_response_id", "conversation", "background", "prompt", "top_logprobs")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class _Part(Struct):
    type: str = "input_text"
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    file_id: str | None = None


class _Item(Struct):
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: Any = ""
    output: str | list[_Part] | None = None
    encrypted_content: str | None = None


class _Tool(Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: Any = None


class _Format(Struct):
    type: str = "text"


class _Text(Struct):
    format: _Format | None = None


class _Body(Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: _Text | None = None
    include: list[str] | None = None


class Responses(OpenAiErrors, Dialect):
    """The dialect; reasoning is in items of type ``reasoning``, also as ``encrypted_content``."""

    path = "/v1/responses"

    @override
    def request(self, body: Json) -> ChatRequest:
        fields = convert(body, _Body)
        refuse_fields(body, _REFUSED)
        if fields.text is not None and fields.text.format is not None and fields.text.format.type != "text":
            raise BadRequestError(f"text.format.type={fields.text.format.type!r:.100} is not supported; use text")
        if "message.output_text.logprobs" in (fields.include or ()):
            raise BadRequestError("include=message.output_text.logprobs is not supported")
        choice, unsupported = read_tool_choice(fields.tool_choice, fields.parallel_tool_calls)
        offered = fields.tools or () if choice else ()
        hosted = [tool for tool in offered if tool.type != "function"]
        tools = [make_tool(tool.name, tool.description, tool.parameters) for tool in offered if tool.type == "function"]
        items = [_Item(content=fields.input)] if isinstance(fields.input, str) else fields.input
        system = [Message("system", fields.instructions)] if fields.instructions else []
        return ChatRequest(
            check_conversation([*system, *_messages(items)]),
            check_tool_names(tools),
            fields.model,
            (),
            read_max_tokens(fields.max_output_tokens),
            bool(fields.stream),
            True,
            read_sampling(body, _SAMPLING),
            (*unsupported, *hosted_tools(tool.type for tool in hosted)),
        )

    @override
    def reply(self, reply: Reply) -> Json:
        is_cut = reply.finish == "length"
        details = {"reason": "max_output_tokens"} if is_cut else None
        status = "incomplete" if is_cut else "completed"
        return {**_head(reply, status), "incomplete_details": details, "output": _items(reply), "usage": _usage(reply)}

    @override
    def events(self, reply: Reply, *, usage: bool) -> Iterator[bytes]:
        numbers = count()

        def make_event(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        begun = {**_head(reply, "in_progress"), "output": [], "usage": None}
        yield make_event("response.created", response=begun)
        yield make_event("response.in_progress", response=begun)
        for index, item in enumerate(_items(reply)):
            content = "arguments" if item["type"] == "function_call" else "content"
            added = {**item, content: type(item[content])(), "status": "in_progress"}
            yield make_event("response.output_item.added", output_index=index, item=added)
            keys: Json = {"item_id": item["id"], "output_index": index}
            if item["type"] == "function_call":
                arguments, name = item["arguments"], item["name"]
                yield make_event("response.function_call_arguments.delta", **keys, delta=arguments)
                yield make_event("response.function_call_arguments.done", **keys, name=name, arguments=arguments)
            else:
                (text,) = item["content"]
                kind = f"response.{'reasoning' if item['type'] == 'reasoning' else 'output'}_text"
                keys["content_index"] = 0
                yield make_event("response.content_part.added", **keys, part={**text, "text": ""})
                yield make_event(f"{kind}.delta", **keys, delta=text["text"])
                yield make_event(f"{kind}.done", **keys, text=text["text"])
                yield make_event("response.content_part.done", **keys, part=text)
            yield make_event("response.output_item.done", output_index=index, item=item)
        response = self.reply(reply)
        yield make_event(f"response.{response['status']}", response=response)

    @override
    def error_event(self, message: str, status: int) -> bytes:
        code = "invalid_prompt" if status < 500 else "server_error"
        response = {"object": "response", "status": "failed", "error": {"code": code, "message": message}, "output": []}
        return event({"type": "response.failed", "sequence_number": 0, "response": response}, "response.failed")


class _Turn:
    """An assistant's message as its items come."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text = ""
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        return assistant_message(self.text, "\n".join(self.reasoning), self.calls)


def _messages(items: Sequence[_Item]) -> list[Message]:
    """Return items as messages: those of the assistant that follow each other are one.

    Programs that run the calls of a turn one after the other send each result behind its call. So a call belongs to the message
    with other calls of its turn, if there is one.
    """
    entries, turns = list[Message | _Turn](), dict[int, _Turn]()
    for item in items:
        if item.type not in ("reasoning", "function_call") and not (
            item.type == "message" and item.role == "assistant"
        ):
            entries.append(_other_message(item))
            continue
        number = call_turn(item.call_id) if item.type == "function_call" else None
        turn = turns.get(number) if number is not None else None
        if turn is None:
            last = entries[-1] if entries else None
            turn = last if isinstance(last, _Turn) else _Turn()
            if turn is not last:
                entries.append(turn)
        if item.type == "reasoning":
            turn.reasoning.append(_reasoning(item))
        elif item.type == "message":
            turn.text += "".join(map(_text, _parts(item.content)))
        else:
            turn.calls.append(make_call(item.call_id, item.name, item.arguments))
            if number is not None:
                turns[number] = turn
    return [entry.message() if isinstance(entry, _Turn) else entry for entry in entries]


def _other_message(item: _Item) -> Message:
    if item.type == "message":
        role: Role = "user" if item.role == "user" else "system"
        return message_of_pieces(role, _pieces(item.content))
    if item.type == "function_call_output":
        return message_of_pieces("tool", _pieces(item.output), tool_call_id=item.call_id)
    raise BadRequestError(f"input of type {item.type!r:.100} is not supported")


def _parts(content: str | Sequence[_Part] | None) -> Sequence[_Part]:
    return [_Part(text=content or "")] if content is None or isinstance(content, str) else content


def _text(content: _Part) -> str:
    if content.type not in _TEXT_PARTS:
        raise BadRequestError(f"content of type {content.type!r:.100} is not supported here; use text")
    return content.text or content.refusal


def _pieces(content: str | Sequence[_Part] | None) -> list[str | Image]:
    return [_read_image(piece) if piece.type == "input_image" else _text(piece) for piece in _parts(content)]


def _read_image(content: _Part) -> Image:
    if content.file_id:
        raise BadRequestError(f"input_image with file_id={content.file_id!r:.100} is not supported; send image_url")
    return read_image(content.image_url, "input_image.image_url")


def _reasoning(item: _Item) -> str:
    """Return the text of a reasoning item; programs keep it in one of two places."""
    if isinstance(item.content, list) and item.content:
        return "".join(content.text for content in item.content)
    try:
        return base64.b64decode(item.encrypted_content or "", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise BadRequestError("encrypted_content of a reasoning item is not of this endpoint") from None


def _head(reply: Reply, status: str) -> Json:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": reply.model,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _items(reply: Reply) -> list[Json]:
    items: list[Json] = []
    if reply.reasoning:
        encrypted = base64.b64encode(reply.reasoning.encode()).decode()
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        head = {"id": f"rs_{reply.id}", "type": "reasoning", "summary": []}
        items.append({**head, "content": content, "encrypted_content": encrypted, "status": "completed"})
    if reply.text or not reply.calls:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        items.append({**head, "content": [text], "status": "completed"})
    for call in reply.calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        head = {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        items.append({**head, "arguments": arguments, "status": "completed"})
    return items


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }
