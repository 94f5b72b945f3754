"""The contract of dialects, and the request and reply that all of them share."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import orjson

from agentrl.core.images import IMAGE_MARK, Image, without_marks
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import schema_problem
from agentrl.core.types import THINK, THINK_END, Message, Role, ToolCall

S = TypeVar("S")
Json = dict[str, Any]
"""A JSON object."""
Finish = Literal["stop", "stop_sequence", "length", "tool_calls"]
"""Why a reply ended."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""As ``json.dumps``, which makes an encoder each time."""
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""A surrogate in JSON that is not one of a pair."""
_decode = msgspec.json.Decoder().decode
_MESSAGE_CHARACTERS = 1000
_CALL_ID = re.compile(r"call_(\d{1,9})_\d{1,9}")
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


class BadRequestError(Exception):
    """A request that is answered with a status of 4xx.

    Args:
        message: what is wrong, with the value.
        status: of HTTP.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message if len(message) <= _MESSAGE_CHARACTERS else f"{message[:_MESSAGE_CHARACTERS]}…"
        self.status = status


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field of a request that has no effect. Example: ``Ignored("top_p", 0.5, "the run's sampling parameters hold")``."""

    name: str
    """The field."""
    value: object
    """What it is set to."""
    why: str
    """The reason, in words."""

    def __str__(self) -> str:
        """Return field, value and reason."""
        return f"{self.name}={self.value} ({self.why})"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a turn of the policy, whatever dialect it was sent in."""

    messages: tuple[Message, ...]
    """The whole conversation; reasoning is in ``<think>`` at the start of an assistant's content, as agentrl writes it."""
    tools: tuple[Tool, ...] = ()
    """Tools that the agent program runs."""
    model: str = ""
    """The name that the program uses for the policy."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn; they are not in the reply."""
    max_tokens: int | None = None
    """Most tokens of the turn."""
    stream: bool = False
    """Whether the reply is a stream of events."""
    stream_usage: bool = True
    """Whether the stream has the numbers of tokens."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters in the request. The run's are used."""
    unsupported: tuple[Ignored, ...] = ()
    """What the request has besides them that has no effect."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the policy as an agent program sees it."""

    turn: int
    """Its number in the session, from 0."""
    session: str
    """Letters, digits, ``_`` and ``-``."""
    created: int
    """Seconds since 1970."""
    model: str
    """The name in the request."""
    reasoning: str = ""
    """Without its markers."""
    text: str = ""
    """Without reasoning, calls and the stop string."""
    calls: tuple[ToolCall, ...] = ()
    """With ids of letters, digits and ``_``."""
    finish: Finish = "stop"
    """Why it ended."""
    stop: str | None = None
    """The stop string that ended it."""
    prompt_tokens: int = 0
    """Tokens before the turn."""
    completion_tokens: int = 0
    """Tokens of the turn."""
    cached_tokens: int = 0
    """Tokens before the turn that the engine had in its prefix cache."""

    @property
    def id(self) -> str:
        """Unique in the run."""
        return f"{self.session}-{self.turn}"


class Dialect(Protocol):
    """One HTTP interface. Pure functions of bodies; see `agentrl.gateway.server` for the rest."""

    path: str
    """Where requests are posted, such as ``/v1/chat/completions``."""

    def request(self, body: Json) -> ChatRequest:
        """Return what a body requests.

        Raises:
            BadRequestError: it is no valid body, or requests what is not supported.
        """
        ...

    def reply(self, reply: Reply) -> Json:
        """Return the body of a reply."""
        ...

    def events(self, reply: Reply, *, usage: bool) -> Iterator[bytes]:
        """Yield the server-sent events of a reply."""
        ...

    def error(self, message: str, status: int) -> Json:
        """Return the body of an error."""
        ...

    def error_event(self, message: str, status: int) -> bytes:
        """Return the server-sent event of an error in a stream that has begun."""
        ...


def read_json(text: str | bytes, subject: str) -> Any:
    """Return the value of a JSON text; ``subject`` names it in messages.

    Whole numbers keep all their digits.

    Raises:
        BadRequestError: it is not JSON, is nested too deeply, or has text that is not Unicode.
    """
    try:
        return _decode(text)
    except RecursionError:
        raise BadRequestError(f"{subject} is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        content = text.encode(errors="replace") if isinstance(text, str) else text
        half = _HALF_CHARACTER.search(content)
        fault = f"{half[0].decode()} is half a character, which no Unicode text has" if half else error
        raise BadRequestError(f"{subject} is not JSON: {fault}") from None


def convert(value: Any, kind: type[S]) -> S:
    """Return a JSON value as an object of ``kind``; fields that it does not have are left out.

    Raises:
        BadRequestError: it does not fit.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None
    except RecursionError:
        raise BadRequestError("the body is nested too deeply") from None


def make_tool(name: str, description: str | None, parameters: Any) -> Tool:
    """Return a tool that the agent program runs.

    Raises:
        BadRequestError: the name or the schema cannot be used.
    """
    schema = parameters or {"type": "object", "properties": {}}
    if not isinstance(schema, dict):
        raise BadRequestError(f"tools: the parameters of {name!r:.200} are no JSON Schema: {schema!r:.100}")
    made = _make_tool(name, description or "", json.dumps(schema, ensure_ascii=False))
    if isinstance(made, str):
        raise BadRequestError(made)
    return made


@lru_cache(maxsize=4096)
def _make_tool(name: str, description: str, schema_text: str) -> Tool | str:
    """Return a tool, or what is wrong with it; every request of a program has the same ones."""
    if not _TOOL_NAME.fullmatch(name):
        return f"tools: the name {name!r:.200} is not 1 to 128 letters, digits or any of _ . : / -"
    schema = json.loads(schema_text)
    try:
        problem = schema_problem(schema)
    except RecursionError:
        problem = "its JSON Schema is nested too deeply"
    return f"tools: {name}: {problem}" if problem else Tool(name, description, schema)


def check_tool_names(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return tools whose names differ.

    Raises:
        BadRequestError: two have one name.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadRequestError(f"tools: several have the name {max(names, key=names.count)!r}")
    return tuple(tools)


def read_image(url: object, name: str) -> Image:
    """Return the image of a ``data:`` URL. Nothing is fetched, and no file is read.

    Args:
        url: of the request.
        name: of the field, for messages.

    Raises:
        BadRequestError: it is another address, or no image.
    """
    if not isinstance(url, str) or not url.startswith("data:"):
        raise BadRequestError(f"{name}={url!r:.100}: images are not fetched; send a data: URL, data:image/…;base64,…")
    try:
        return Image.from_data_url(url)
    except ValueError as error:
        raise BadRequestError(f"{name}: {error}") from None


def message_of_pieces(
    role: Role, pieces: Sequence[str | Image], separator: str = "\n", tool_call_id: str | None = None
) -> Message:
    """Return a message of texts and images in their order; ``separator`` is between texts that follow each other."""
    images = tuple(piece for piece in pieces if isinstance(piece, Image))
    if not images:
        return Message(role, separator.join(str(piece) for piece in pieces), tool_call_id=tool_call_id)
    texts = list[str]()
    for index, piece in enumerate(pieces):
        if isinstance(piece, Image):
            texts.append(IMAGE_MARK)
            continue
        follows_text = index > 0 and isinstance(pieces[index - 1], str)
        texts.append((separator if follows_text else "") + without_marks(piece))
    return Message(role, "".join(texts), tool_call_id=tool_call_id, images=images)


def assistant_message(text: str, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """Return a message of the assistant with its reasoning as agentrl writes it."""
    thought = f"{THINK}\n{reasoning}\n{THINK_END}\n\n" if reasoning else ""
    return Message("assistant", thought + text, tuple(calls))


def make_call(id: str, name: str, arguments: Any) -> ToolCall:
    """Return a call that an assistant's message has.

    Raises:
        BadRequestError: ``arguments`` is neither a JSON object nor the text of one.
    """
    subject = f"the arguments of the call {id!r:.100}"
    value = read_json(arguments, subject) if isinstance(arguments, str) and arguments.strip() else arguments
    if not isinstance(value or {}, dict):
        raise BadRequestError(f"{subject} are no JSON object: {value!r:.100}")
    return ToolCall(id, name, value or {})


def check_conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages of a request for a turn.

    Raises:
        BadRequestError: there is nothing to answer, or a tool message answers no call.
    """
    if not messages:
        raise BadRequestError("messages is empty")
    if messages[-1].role == "assistant":
        raise BadRequestError("the last message has the role assistant: a turn answers other messages")
    call_ids = set[str | None]()
    for message in messages:
        if message.role == "tool" and message.tool_call_id not in call_ids:
            raise BadRequestError(
                f"a tool message answers the call {message.tool_call_id!r:.100}, which no message makes"
            )
        if message.tool_calls:
            call_ids.update(call.id for call in message.tool_calls)
    return tuple(messages)


def read_tool_choice(choice: object, parallel: bool | None = None) -> tuple[bool, tuple[Ignored, ...]]:
    """Return whether tools are offered, and what of ``tool_choice`` and ``parallel_tool_calls`` has no effect.

    The policy is offered tools or not; it is not forced to call one, or one at a time.

    Raises:
        BadRequestError: it is no choice.
    """
    unsupported: tuple[Ignored, ...] = ()
    if parallel is False:
        unsupported = (Ignored("parallel_tool_calls", "false", "the policy may make several calls in one turn"),)
    if choice in (None, "auto"):
        return True, unsupported
    if choice == "none":
        return False, unsupported
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in ("required", "any", "function", "tool", "allowed_tools", "auto", "none"):
        raise BadRequestError(f"tool_choice={choice!r:.200} is not auto, none, required, or a function")
    if kind in ("auto", "none"):
        return kind == "auto", unsupported
    return True, (Ignored("tool_choice", kind, "the policy is not forced to call a tool"), *unsupported)


def hosted_tools(kinds: Iterable[object]) -> tuple[Ignored, ...]:
    """Return the tools of these types as fields without effect: their provider would run them."""
    return tuple(
        Ignored("tools", kind, "tools that a provider runs itself are not offered to the policy") for kind in kinds
    )


def read_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """Return stop strings.

    Raises:
        BadRequestError: one is empty, or there are too many.
    """
    if len(stop) > 32 or not all(stop):
        raise BadRequestError(f"stop has {len(stop)} strings; at most 32 of one or more characters are supported")
    return tuple(stop)


def read_max_tokens(tokens: int | None) -> int | None:
    """Return the limit of a turn.

    Raises:
        BadRequestError: it is below 1.
    """
    if tokens is not None and tokens < 1:
        raise BadRequestError(f"max_tokens={tokens} must be at least 1")
    return tokens


def read_sampling(body: Json, names: Iterable[str]) -> Json:
    """Return the sampling parameters that a body sets."""
    return {name: body[name] for name in names if body.get(name) is not None}


def refuse_fields(body: Json, names: Iterable[str]) -> None:
    """Refuse fields that would change what a reply is.

    Raises:
        BadRequestError: the body has one, with a value that requests something.
    """
    for name in names:
        if body.get(name) not in (None, False, 0, [], {}, "none"):
            raise BadRequestError(f"{name} is not supported")


def call_id(turn: int, number: int) -> str:
    """Return the id of a call of a turn for agent programs."""
    return f"call_{turn}_{number}"


def call_turn(id: str) -> int | None:
    """Return the turn of a call by its id; None if it is not one that `call_id` returned."""
    match = _CALL_ID.fullmatch(id)
    return None if match is None else int(match[1])


def event(data: Json | str, name: str | None = None) -> bytes:
    """Return a server-sent event."""
    content = data.encode() if isinstance(data, str) else encode_json(data)
    if name is None:
        return b"data: %b\n\n" % content
    return b"event: %b\ndata: %b\n\n" % (name.encode(), content)


def encode_json(data: Json) -> bytes:
    """Return a JSON object as a JSON text."""
    try:
        return orjson.dumps(data)
    except TypeError:  # whole numbers above 64 bits
        return _encode(data).encode()


class OpenAiErrors:
    """Errors as OpenAI's APIs have them."""

    def error(self, message: str, status: int) -> Json:
        """Return the body of an error."""
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    def error_event(self, message: str, status: int) -> bytes:
        """Return the event of an error in a stream."""
        return event(self.error(message, status))
