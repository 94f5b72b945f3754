"""OpenAI's ``POST /v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from typing_extensions import override

from agentrl.core.images import Image
from agentrl.core.types import Message
from agentrl.gateway.dialects.base import (
    BadRequestError,
    ChatRequest,
    Dialect,
    Json,
    OpenAiErrors,
    Reply,
    assistant_message,
    check_conversation,
    check_tool_names,
    convert,
    event,
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

_SAMPLING = (
    "temperature", "top_p", "top_k", "seed", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
_REFUSED = ("logprobs", "top_logprobs", "audio", "prediction", "web_search_options", "functions", "function_call")
"""Fields that would change what a reply is; a value that requests nothing is allowed."""


class _ImageUrl(Struct):
    url: str = ""


class ContentPart(Struct):
    """A part of a message's content."""

    type: str = "text"
    text: str = ""
    refusal: str = ""
    image_url: str | _ImageUrl | None = None


class _Function(Struct):
    name: str
    arguments: Any = ""


class _Call(Struct):
    id: str
    function: _Function
    type: Literal["function"] = "function"


class _Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | ContentPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ToolFunction(Struct):
    name: str
    description: str | None = None
    parameters: Any = None


class _Tool(Struct):
    function: _ToolFunction
    type: Literal["function"] = "function"


class _StreamOptions(Struct):
    include_usage: bool | None = None


class _Format(Struct):
    type: str = "text"


class _Body(Struct):
    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: _Format | None = None
    modalities: list[str] = field(default_factory=list)


class ChatCompletions(OpenAiErrors, Dialect):
    """The dialect; reasoning is in ``reasoning_content``, as servers of open models have it."""

    path = "/v1/chat/completions"

    @override
    def request(self, body: Json) -> ChatRequest:
        fields = convert(body, _Body)
        _refuse(body, fields)
        choice, unsupported = read_tool_choice(fields.tool_choice, fields.parallel_tool_calls)
        tools = [
            make_tool(tool.function.name, tool.function.description, tool.function.parameters)
            for tool in (fields.tools or () if choice else ())
        ]
        stop = fields.stop or ()
        return ChatRequest(
            check_conversation([_message(message) for message in fields.messages]),
            check_tool_names(tools),
            fields.model,
            read_stop((stop,) if isinstance(stop, str) else stop),
            read_max_tokens(fields.max_completion_tokens or fields.max_tokens),
            bool(fields.stream),
            fields.stream_options is not None and bool(fields.stream_options.include_usage),
            read_sampling(body, _SAMPLING),
            unsupported,
        )

    @override
    def reply(self, reply: Reply) -> Json:
        message: Json = {"role": "assistant", "content": reply.text if reply.text or not reply.calls else None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = _calls(reply)
        choice: Json = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        if reply.finish == "stop_sequence":
            choice["matched_stop"] = reply.stop  # as SGLang says it; the text does not have it
        return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}

    @override
    def events(self, reply: Reply, *, usage: bool) -> Iterator[bytes]:
        head = _head(reply, "chat.completion.chunk")

        def chunk(delta: Json, finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return event({**head, "choices": [choice]})

        yield chunk({"role": "assistant", "content": "" if reply.text or not reply.calls else None})
        if reply.reasoning:
            yield chunk({"reasoning_content": reply.reasoning})
        if reply.text:
            yield chunk({"content": reply.text})
        for index, call in enumerate(_calls(reply)):
            yield chunk({"tool_calls": [{"index": index, **call}]})
        yield chunk({}, _finish(reply))
        if usage:
            yield event({**head, "choices": [], "usage": _usage(reply)})
        yield event("[DONE]")


def _refuse(body: Json, fields: _Body) -> None:
    """Refuse what is not supported.

    Raises:
        BadRequestError: the body has it.
    """
    if fields.n not in (None, 1):
        raise BadRequestError(f"n={fields.n}: a request is for one turn; send several requests")
    refuse_fields(body, _REFUSED)
    if fields.response_format is not None and fields.response_format.type != "text":
        raise BadRequestError(f"response_format.type={fields.response_format.type!r:.100} is not supported; use text")
    if set(fields.modalities) - {"text"}:
        raise BadRequestError(f"modalities={fields.modalities} is not supported; use text")


def _text(content: str | ContentPart) -> str:
    """Return the text of a part.

    Raises:
        BadRequestError: it has none.
    """
    if not isinstance(content, str) and content.type not in ("text", "refusal"):
        raise BadRequestError(f"content of type {content.type!r:.100} is not supported here; use text")
    return content if isinstance(content, str) else content.text or content.refusal


def _text_or_image(content: str | ContentPart) -> str | Image:
    if isinstance(content, str) or content.type != "image_url":
        return _text(content)
    address = content.image_url
    return read_image(address.url if isinstance(address, _ImageUrl) else address, "image_url")


def read_content(content: str | Sequence[str | ContentPart]) -> list[str | Image]:
    """Return the texts and images of a message's content.

    Raises:
        BadRequestError: it has a part of another type, or an image that is no ``data:`` URL.
    """
    return [content] if isinstance(content, str) else [*map(_text_or_image, content)]


def _message(message: _Message) -> Message:
    content = message.content or ""
    if message.role == "assistant":
        calls = [make_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        text = content if isinstance(content, str) else "".join(map(_text, content))
        return assistant_message(text, message.reasoning_content or message.reasoning, calls)
    pieces = read_content(content)
    if message.role == "tool":
        return message_of_pieces("tool", pieces, tool_call_id=message.tool_call_id or "")
    return message_of_pieces("system" if message.role == "developer" else message.role, pieces)


def _head(reply: Reply, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _calls(reply: Reply) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in reply.calls
    ]


def _finish(reply: Reply) -> str:
    return "stop" if reply.finish == "stop_sequence" else reply.finish


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }
