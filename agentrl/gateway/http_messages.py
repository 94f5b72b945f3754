"""Bodies of requests and responses of the gateway."""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from agentrl.gateway.dialects.base import BadRequestError, Json, encode_json, read_json

BODY_BYTES = 64 * 2**20
"""Bytes of the largest request."""
_TOO_LONG = f"a request may have {BODY_BYTES} bytes"
_HEADERS = "agentrl.headers"
"""Key of the scope of a request; see `read_headers`."""
CLOSED_REQUEST = 499
"""The status for a request whose client has disconnected, which never reads it."""


def read_headers(http: Request) -> Mapping[str, str]:
    """Return the headers of a request by their names in small letters; the first of several with one name."""
    headers: Mapping[str, str] | None = http.scope.get(_HEADERS)
    if headers is None:
        lines = reversed(http.scope["headers"])
        headers = http.scope[_HEADERS] = {name.decode("latin-1"): value.decode("latin-1") for name, value in lines}
    return headers


async def read_body(http: Request) -> bytes:
    """Return the body of a request.

    Raises:
        BadRequestError: it is too long, or compressed.
        ClientDisconnect: the client has closed the connection.
    """
    headers = read_headers(http)
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise BadRequestError(f"content-encoding: {encoding:.100} is not supported; send the body as it is", 415)
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 20 or int(length) > BODY_BYTES:
        raise BadRequestError(_TOO_LONG, 413)
    chunks, size, is_over = list[bytes](), 0, False
    while not is_over:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        size, is_over = size + len(chunks[-1]), not message.get("more_body", False)
        if size > BODY_BYTES:
            raise BadRequestError(_TOO_LONG, 413)
    if size > HIGH_WATER_LIMIT:
        has_disconnected(http)  # the server continues to read the connection, so that it sees its end
    return b"".join(chunks)


def read_object(content: bytes) -> Json:
    """Return the JSON object of a body.

    Raises:
        BadRequestError: it is none.
    """
    body = read_json(content, "the body")
    if not isinstance(body, dict):
        raise BadRequestError(f"the body is no JSON object: {body!r:.100}")
    return body


def check_numbers(values: Mapping[str, float]) -> None:
    """Check that a reward and metrics are finite numbers.

    Raises:
        BadRequestError: one is not.
    """
    if faults := [name for name, value in values.items() if not math.isfinite(value)]:
        raise BadRequestError(f"{faults[0]} is {values[faults[0]]}; it must be a finite number")


def named_agent(http: Request) -> str | None:
    """Return the agent that a request names by its address or header; None: none.

    Raises:
        BadRequestError: it names two.
    """
    names = (http.path_params.get("agent"), read_headers(http).get("x-agentrl-agent"))
    agents = {name for name in names if name is not None}
    if len(agents) > 1:
        raise BadRequestError(f"the address names the agent {names[0]!r:.200}, and x-agentrl-agent {names[1]!r:.200}")
    return agents.pop() if agents else None


def has_disconnected(http: Request) -> bool:
    """Return whether the client of a request, whose body has been read, has closed the connection, or has the whole reply.

    A task that waits for it would cost more than the rest of a request.
    """
    receiving = http.receive()
    assert isinstance(receiving, Coroutine), "servers receive in a coroutine"
    try:
        receiving.send(None)
    except StopIteration as end:
        return bool(end.value["type"] == "http.disconnect")
    finally:
        receiving.close()
    return False


async def wait_for_disconnect(http: Request) -> None:
    """Wait until the client of a request, whose body has been read, has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def json_reply(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON object."""
    return Response(encode_json(content), status, headers, media_type="application/json")
