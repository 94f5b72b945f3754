"""A tool server's routes: sessions, calls, health and metrics as JSON over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentrl.core.types import ToolCall
from agentrl.toolserver.server.auth import BearerAuth, SameOriginOnly
from agentrl.toolserver.server.errors import Draining, Full, Refusal
from agentrl.toolserver.server.metrics import CONTENT_TYPE
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions

MAX_BODY = 16 * 2**20
"""Bytes of the largest request."""
MAX_ID = 256
"""Characters of the longest id that a client may choose."""
MAX_CALLS = 256
"""Calls in the largest request for stateless tools."""
RETRY_AFTER_S = 5
"""The header ``Retry-After`` of replies with status 503."""
_CLOSED_REQUEST = 499
"""The status for a request whose client has disconnected, which never reads it."""


def _reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if isinstance(error, Full | Draining) else None
    return _reply({"error": str(error)}, error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _reply({"error": error.detail}, error.status_code, dict(error.headers or {}))
    return _reply({"error": f"the server failed: {type(error).__name__}: {error}"}, 500)  # Starlette logs the traceback


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED_REQUEST)  # the client disconnected before the whole body had arrived


async def read_body(request: Request) -> dict[str, Any]:
    """Return a request's JSON object; an empty body is an empty one.

    Raises:
        HTTPException: 413 if it is too long, 400 if it is not a JSON object.

    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HTTPException(413, f"a request may have {MAX_BODY} bytes")
    try:
        # Not orjson: it turns whole numbers beyond 64 bits into floats.
        content = json.loads(bytes(body).decode(), parse_constant=_no_number) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPException(400, f"the body must be a JSON object, it is a {type(content).__name__}")
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_call(content: dict[str, Any]) -> ToolCall:
    """Return the call in a request.

    Raises:
        HTTPException: 400 if a field is missing, unknown or of another type.

    """
    _check_known(content, ("call_id", "tool", "arguments"))
    tool, arguments = content.get("tool"), content.get("arguments")
    if not isinstance(tool, str):
        raise HTTPException(400, f"'tool' must be a string, it is {tool!r:.100}")
    if not isinstance(arguments, dict):
        raise HTTPException(400, f"'arguments' must be an object, it is {arguments!r:.100}")
    return ToolCall(_read_id(content, "call_id"), tool, arguments)


def _read_id(content: dict[str, Any], field: str) -> str:
    value = content.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID or not value.isprintable():
        raise HTTPException(
            400, f"'{field}' must be a string of 1 to {MAX_ID} printable characters, it is {value!r:.100}"
        )
    return value


def _check_known(content: dict[str, Any], known: Sequence[str]) -> None:
    for name in content:
        if name not in known:
            raise HTTPException(400, f"unknown field {name!r:.100}; there are: {', '.join(known)}")


async def _open_unless_disconnected(request: Request, sessions: Sessions, episode_id: str) -> Session | None:
    """Wait for a session; if the client disconnects, leave the queue and return None."""
    opening = asyncio.ensure_future(sessions.open(episode_id))
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait([opening, leaving], return_when=asyncio.FIRST_COMPLETED)
        return opening.result() if opening.done() else None
    finally:
        opening.cancel()
        leaving.cancel()
        await asyncio.gather(opening, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Api:
    """The routes."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def open(self, request: Request) -> Response:
        content = await read_body(request)
        _check_known(content, ("episode_id",))
        episode_id = _read_id(content, "episode_id") if content.get("episode_id") is not None else ""
        session = self._sessions.open_now(episode_id) or await _open_unless_disconnected(
            request, self._sessions, episode_id
        )
        if session is None:
            return Response(status_code=_CLOSED_REQUEST)
        return _reply({"session_id": session.id, "server": self._sessions.instance})

    async def call(self, request: Request) -> Response:
        call = read_call(await read_body(request))
        answer = await self._sessions.find(request.path_params["session_id"]).call(call)
        return Response(answer.body, media_type="application/json")

    async def call_stateless(self, request: Request) -> Response:
        content = await read_body(request)
        _check_known(content, ("calls",))
        calls = content.get("calls")
        if not isinstance(calls, list) or len(calls) > MAX_CALLS or not all(isinstance(call, dict) for call in calls):
            raise HTTPException(400, f"'calls' must be a list of at most {MAX_CALLS} objects")
        answers = await self._sessions.call_stateless([read_call(call) for call in calls])
        body = b'{"server":"%s","results":[%s]}' % (
            self._sessions.instance.encode(),
            b",".join(answer.body for answer in answers),
        )
        return Response(body, media_type="application/json")

    async def close(self, request: Request) -> Response:
        await self._sessions.close(request.path_params["session_id"])
        return Response(status_code=204)

    async def tools(self, request: Request) -> Response:
        specs = [tool.spec for tool in self._sessions.tools.values()]
        shown = [
            {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)} for spec in specs
        ]
        return _reply({"tools": shown})

    async def health(self, request: Request) -> Response:
        status = "draining" if self._sessions.draining else "ok"
        fields = {"status": status, "sessions": len(self._sessions), "server": self._sessions.instance}
        for tool in self._sessions.tools.values():
            fields |= tool.health()
        return _reply(fields)

    async def metrics(self, request: Request) -> Response:
        return Response(self._sessions.metrics.text(), media_type=CONTENT_TYPE)


def make_app(sessions: Sessions, *, token: str | None = None, mounts: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the server as an ASGI application.

    Args:
        sessions: the sessions and tools that it serves.
        token: the bearer token that requests need; None if they need none.
        mounts: further routes, such as those of MCP.
    """
    api = _Api(sessions)
    return Starlette(
        routes=[
            Route("/sessions/{session_id}/call", api.call, methods=["POST"]),
            Route("/sessions/{session_id}", api.close, methods=["DELETE"]),
            Route("/sessions", api.open, methods=["POST"]),
            Route("/calls", api.call_stateless, methods=["POST"]),
            Route("/tools", api.tools),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            *(route for tool in sessions.tools.values() for route in tool.routes()),
            *mounts,
        ],
        middleware=[Middleware(SameOriginOnly) if token is None else Middleware(BearerAuth, token=token)],
        exception_handlers={
            Refusal: _refused,
            ClientDisconnect: _disconnected,
            HTTPException: _failed,
            Exception: _failed,
        },
    )
