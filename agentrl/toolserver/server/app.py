"""A tool server's routes: sessions, calls, health and metrics as JSON over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from agentrl.core.background import first_ended
from agentrl.core.task import IMAGE_NAME
from agentrl.core.types import ToolCall
from agentrl.toolserver import request_limits
from agentrl.toolserver.server.auth import BodyLimit, Guard, other_origin, token_required
from agentrl.toolserver.server.errors import Draining, Full, Refusal
from agentrl.toolserver.server.metrics import CONTENT_TYPE
from agentrl.toolserver.server.session import Session
from agentrl.toolserver.server.sessions import Sessions

MCP_PATH = "/mcp"
"""Where MCP clients connect."""
B = TypeVar("B", bound=BaseModel)
_CLOSED_REQUEST = 499
"""The status for a request whose client has disconnected, which never reads it."""


def _reply(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


async def _refusal_reply(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"Retry-After": str(request_limits.RETRY_AFTER_S)} if isinstance(error, Full | Draining) else None
    return _reply({"error": str(error)}, error.status, headers)


async def _error_reply(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _reply({"error": error.detail}, error.status_code, dict(error.headers or {}))
    return _reply({"error": f"the server failed: {type(error).__name__}: {error}"}, 500)  # Starlette logs the traceback


async def _disconnect_reply(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLOSED_REQUEST)  # the client disconnected before the whole body had arrived


class _Body(BaseModel):
    """A JSON object in a request; unknown fields and other types fail."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Id = Annotated[str, Field(max_length=request_limits.ID_CHARACTERS, pattern=r"^([^\p{C}\p{Z}]| )+$")]
"""Printable characters."""


class _Open(_Body):
    """``POST /sessions``."""

    episode_id: _Id | None = None
    image: Annotated[str, Field(pattern=IMAGE_NAME)] | None = None


class _Call(_Body):
    """``POST /sessions/{session_id}/call``."""

    call_id: _Id
    tool: str
    arguments: dict[str, Any]


class _Calls(_Body):
    """``POST /calls``."""

    calls: list[_Call] = Field(max_length=request_limits.CALLS)


async def read_body(request: Request, body: type[B]) -> B:
    """Return a request's JSON object; an empty request is an empty object.

    Raises:
        HTTPException: 413 if it is too long, 400 if it is not the JSON object that the route takes.
    """
    content = await request.body()
    try:
        # Not orjson: it turns whole numbers beyond 64 bits into floats.
        return body.model_validate(json.loads(content.decode(), parse_constant=_no_number) if content else {})
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'the body'}: {fault['msg']}" for fault in error.errors())
        raise HTTPException(400, "; ".join(faults)) from None
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


async def _open_unless_disconnected(
    request: Request, sessions: Sessions, episode_id: str, image: str | None
) -> Session | None:
    """Wait for a session; if the client disconnects, leave the queue and return None."""
    async with first_ended(sessions.open(episode_id, image), _wait_for_disconnect(request)) as (opening, _):
        return opening.result() if opening.done() else None


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Api:
    """The routes."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def open(self, request: Request) -> Response:
        body = await read_body(request, _Open)
        episode_id = body.episode_id or ""
        session = self._sessions.open_now(episode_id, body.image) or await _open_unless_disconnected(
            request, self._sessions, episode_id, body.image
        )
        if session is None:
            return Response(status_code=_CLOSED_REQUEST)
        return _reply({"session_id": session.id, "server": self._sessions.instance})

    async def call(self, request: Request) -> Response:
        body = await read_body(request, _Call)
        session = self._sessions.find(request.path_params["session_id"])
        answer = await session.call(ToolCall(body.call_id, body.tool, body.arguments))
        return Response(answer.body, media_type="application/json")

    async def call_stateless(self, request: Request) -> Response:
        calls = (await read_body(request, _Calls)).calls
        try:
            json.dumps([call.arguments for call in calls], ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # half a character would fail the batch that it gets into
            raise HTTPException(400, f"the arguments cannot be encoded: {error}") from None
        answers = await self._sessions.call_stateless(
            [ToolCall(call.call_id, call.tool, call.arguments) for call in calls]
        )
        reply = b'{"server":"%s","results":[%s]}' % (
            self._sessions.instance.encode(),
            b",".join(answer.body for answer in answers),
        )
        return Response(reply, media_type="application/json")

    async def close(self, request: Request) -> Response:
        await self._sessions.close(request.path_params["session_id"])
        return Response(status_code=204)

    async def tools(self, request: Request) -> Response:
        specs = [tool.spec for tool in self._sessions.tools.values()]
        descriptions = [
            {"name": spec.name, "description": spec.description, "parameters": dict(spec.parameters)} for spec in specs
        ]
        return _reply({"tools": descriptions})

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
        middleware=[
            Middleware(BodyLimit),
            Middleware(Guard, fault=other_origin if token is None else token_required(token)),
        ],
        exception_handlers={
            Refusal: _refusal_reply,
            ClientDisconnect: _disconnect_reply,
            HTTPException: _error_reply,
            Exception: _error_reply,
        },
    )
