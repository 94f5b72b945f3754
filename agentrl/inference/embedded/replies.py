"""JSON request bodies and replies in SGLang's format."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from agentrl.core.errors import AgentrlError


class BadRequestError(AgentrlError):
    """A request that cannot be served; the reply has its message."""


Body = dict[str, Any]
"""The JSON object of a request."""


def parse_body(data: bytes) -> Body:
    """Return the JSON object of a request body; an empty body is an empty object.

    Raises:
        BadRequestError: it is not a JSON object.
    """
    try:
        # orjson rejects NaN and Infinity, which no endpoint accepts.
        body = orjson.loads(data) if data else {}
    except json.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    return body


def with_body(handler: Callable[[Body], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """Return an endpoint that passes the parsed body to ``handler`` and answers its `BadRequestError` with 400."""

    async def endpoint(http: HttpRequest) -> Response:
        try:
            return await handler(parse_body(await http.body()))
        except BadRequestError as error:
            return bad_request(error)

    return endpoint


def json_reply(value: Any, status: int = 200) -> Response:
    """Return a JSON reply."""
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")


def bad_request(error: BadRequestError) -> Response:
    """Return a reply with status 400 that has the error's message in SGLang's fields."""
    body = {
        "success": False,
        "message": str(error),
        "error": {"message": str(error), "type": "BadRequest", "code": 400},
    }
    return json_reply(body, 400)
