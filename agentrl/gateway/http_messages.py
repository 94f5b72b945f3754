"""Bodies of requests and responses of the gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentrl.gateway.dialects.base import BadRequestError, Json, read_json

BODY_BYTES = 64 * 2**20
"""Bytes of the largest request."""
CLOSED_REQUEST = 499
"""The status for a request whose client has disconnected, which never reads it."""


async def read_body(http: Request) -> bytes:
    """Return the body of a request.

    Raises:
        BadRequestError: it is too long, or compressed.
    """
    too_long = BadRequestError(f"a request may have {BODY_BYTES} bytes", 413)
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise BadRequestError(f"content-encoding: {encoding:.100} is not supported; send the body as it is", 415)
    length = http.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 20 or int(length) > BODY_BYTES:
        raise too_long
    chunks, size = list[bytes](), 0
    async for chunk in http.stream():
        size += len(chunk)
        if size > BODY_BYTES:
            raise too_long
        chunks.append(chunk)
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
    names = (http.path_params.get("agent"), http.headers.get("x-agentrl-agent"))
    agents = {name for name in names if name is not None}
    if len(agents) > 1:
        raise BadRequestError(f"the address names the agent {names[0]!r:.200}, and x-agentrl-agent {names[1]!r:.200}")
    return agents.pop() if agents else None


async def wait_for_disconnect(http: Request) -> None:
    """Wait until the client of a request, whose body has been read, has closed the connection."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def json_reply(content: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON object."""
    with suppress(TypeError, ValueError):
        return Response(orjson.dumps(content), status, headers, media_type="application/json")
    raise AssertionError(f"a reply that is no JSON: {content!r:.1000}")
