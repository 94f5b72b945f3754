"""Anthropic's ``POST /v1/messages``, and the body of ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from typing_extensions import override

from agentrl.core.images import Image
from agentrl.core.types import Message, ToolCall
from agentrl.gateway.dialects.base import (
    BadRequestError,
    ChatRequest,
    Dialect,
    Json,
    Reply,
    assistant_message,
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
    read_stop,
    read_tool_choice,
    refuse_fields,
)

_SAMPLING = ("temperature", "top_p", "top_k")
_REFUSED = ("mcp_servers", "container", "output_format")
_STOP_REASONS = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_BILLING = "x-anthropic-billing-header:"
"""Begins a text in the system prompt of Claude Code that differs from request to request, and is not for the model."""


class _Source(Struct):
    type: str = "base64"
    media_type: str = ""
    data: str = ""
    url: str = ""


class _Block(Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    source: _Source | None = None


class _Message(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Any = None


class _Body(Struct):
    messages: list[_Message]
    model: str = ""
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: Json | UnsetType | None = UNSET


class Messages(Dialect):
    """The dialect; reasoning is in blocks of type ``thinking``."""

    path = "/v1/messages"

    @override
    def request(self, body: Json) -> ChatRequest:
        fields = convert(body, _Body)
        refuse_fields(body, _REFUSED)
        if isinstance(fields.output_config, dict):
            refuse_fields(fields.output_config, ("format",))
        choice, unsupported = read_tool_choice(fields.tool_choice)
        offered = fields.tools or () if choice else ()
        hosted = [tool for tool in offered if tool.type not in (None, "custom")]
        tools = [make_tool(tool.name, tool.description, tool.input_schema) for tool in offered if tool not in hosted]
        messages = [Message("system", system)] if (system := _system(fields.system)) else []
        for message in fields.messages:
            messages += _messages(message)
        return ChatRequest(
            check_conversation(messages),
            check_tool_names(tools),
            fields.model,
            read_stop(fields.stop_sequences or ()),
            read_max_tokens(fields.max_tokens),
            bool(fields.stream),
            True,
            read_sampling(body, _SAMPLING),
            (*unsupported, *hosted_tools(tool.type for tool in hosted)),
        )

    @override
    def reply(self, reply: Reply) -> Json:
        stop = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": reply.stop}
        return {**_head(reply), "content": _blocks(reply), **stop, "usage": _usage(reply)}

    @override
    def events(self, reply: Reply, *, usage: bool) -> Iterator[bytes]:
        def make_event(name: str, **fields: Any) -> bytes:
            return event({"type": name, **fields}, name)

        start = {**_head(reply), "content": [], "stop_reason": None, "stop_sequence": None}
        yield make_event("message_start", message={**start, "usage": {**_usage(reply), "output_tokens": 0}})
        for index, block in enumerate(_blocks(reply)):
            empty, deltas = _block_deltas(block)
            yield make_event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield make_event("content_block_delta", index=index, delta=delta)
            yield make_event("content_block_stop", index=index)
        stop = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": reply.stop}
        yield make_event("message_delta", delta=stop, usage=_usage(reply))
        yield make_event("message_stop")

    @override
    def error(self, message: str, status: int) -> Json:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    @override
    def error_event(self, message: str, status: int) -> bytes:
        return event(self.error(message, status), "error")


def _system(system: str | Sequence[_Block] | None) -> str:
    blocks = [system] if isinstance(system, str) else [_text(block) for block in system or ()]
    return "\n".join(text for text in blocks if not text.startswith(_BILLING))


def _messages(message: _Message) -> list[Message]:
    """Return a message as those of agentrl: results of tools are separate messages."""
    blocks = [_Block("text", message.content)] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        return [_assistant_message(blocks)]
    messages, pieces = list[Message](), list[str | Image]()
    for block in [*blocks, None]:
        if block is None or block.type == "tool_result":
            if pieces:
                messages.append(message_of_pieces(message.role, pieces))
                pieces = []
            if block is not None:
                messages.append(message_of_pieces("tool", _result(block), tool_call_id=block.tool_use_id))
        else:
            pieces.append(_text_or_image(block))
    return messages or [Message(message.role, "")]


def _assistant_message(blocks: Sequence[_Block]) -> Message:
    texts, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type == "tool_use":
            calls.append(make_call(block.id, block.name, block.input))
        elif block.type != "redacted_thinking":
            texts.append(_text(block))
    return assistant_message("".join(texts), "\n".join(thoughts), calls)


def _text(block: _Block) -> str:
    """Return the text of a block.

    Raises:
        BadRequestError: it is of another type.
    """
    if block.type != "text":
        raise BadRequestError(f"content of type {block.type!r:.100} is not supported here; use text")
    return block.text


def _text_or_image(block: _Block) -> str | Image:
    if block.type != "image":
        return _text(block)
    source = block.source or _Source()
    if source.type == "base64":
        return read_image(f"data:{source.media_type};base64,{source.data}", "image.source")
    if source.type == "url":
        return read_image(source.url, "image.source.url")
    raise BadRequestError(f"image.source.type={source.type!r:.100} is not supported; use base64")


def _result(block: _Block) -> list[str | Image]:
    content = block.content or ""
    return [content] if isinstance(content, str) else [_text_or_image(member) for member in content]


def _head(reply: Reply) -> Json:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(reply: Reply) -> list[Json]:
    blocks: list[Json] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "agentrl"})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)})
    return blocks


def _block_deltas(block: Json) -> tuple[Json, list[Json]]:
    """Return a block as it begins, and what follows."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return {**block, "thinking": "", "signature": ""}, [
            thought,
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
    arguments = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens - reply.cached_tokens,
        "output_tokens": reply.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.cached_tokens,
    }
