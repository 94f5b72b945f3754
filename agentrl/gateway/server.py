"""The HTTP server of the gateway: authentication, limits, retries, and streams of events, for all dialects.

A session's key is its API key (``Authorization: Bearer KEY`` or ``x-api-key``), or a part of the address: ``/s/KEY/v1/…``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.core.child_process import LOOPBACK
from agentrl.gateway.agent_session import Session, SessionOverError
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.answers import Answer, Client
from agentrl.gateway.dialects.base import BadRequestError, ChatRequest, Dialect, Ignored, Json
from agentrl.gateway.dialects.chat_completions import ChatCompletions
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses
from agentrl.gateway.http_messages import (
    CLOSED_REQUEST,
    has_disconnected,
    json_reply,
    named_agent,
    read_body,
    read_headers,
    read_object,
)
from agentrl.gateway.session_routes import END_PATH, Handler, end_session, move, observe, set_reward
from agentrl.toolserver.server.server import UVICORN, Server, listen

_log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Responses(), Messages())
KEEP_ALIVE_S = 5.0
"""Seconds after which a stream that waits for its turn begins, and sends a comment each time."""
SESSIONS_OVER = 1024
"""Sessions that are over whose keys are remembered, so that their agents read why."""
_HEADER_CHARACTERS = 1000
_KEEP_ALIVE = b": waiting\n\n"
_OVER = "this episode is over"
_STREAM = "text/event-stream"
_STREAM_HEADERS = {"cache-control": "no-cache"}

_PREFIXES = ("/s/{key}/agents/{agent}", "/s/{key}", "/agents/{agent}", "")
"""What may precede a path: the key of the session, and the agent."""


class Gateway:
    """The endpoints of all sessions. The server runs while there is a session; its sockets are those of the event loop.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        keys: where address and port are set, for messages.
        keep_alive_s: see `KEEP_ALIVE_S`.
        routes: further ones, which check keys themselves.
    """

    def __init__(
        self,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        keys: str = "",
        keep_alive_s: float = KEEP_ALIVE_S,
        routes: Sequence[Route] = (),
    ) -> None:
        self._host, self._port, self._keys = host, port, keys
        self._keep_alive_s = keep_alive_s
        self._over: dict[str, _SessionOver] = {}
        """By key, the last sessions that are over."""
        self._sessions: dict[str, AgentSessions] = {}
        self._users = 0  # contexts of `serving`
        self._server: Server | None = None
        self._serving: asyncio.Task[None]
        self._url = ""
        self.app = self._make_app(routes)
        """The ASGI application."""

    @property
    def url(self) -> str:
        """Address of the server, without ``/v1``."""
        return self._url

    @asynccontextmanager
    async def open(self, sessions: AgentSessions, key: str = "") -> AsyncIterator[str]:
        """Answer requests to the sessions of an episode, and yield their key; turns in progress are aborted at the end.

        Args:
            sessions: of the episode.
            key: empty for a new one.
        """
        key = key or make_key()
        self._over.pop(key, None)
        self._sessions[key] = sessions
        try:
            yield key
        finally:
            del self._sessions[key]
            self._over[key] = _SessionOver.after(sessions)
            if len(self._over) > SESSIONS_OVER:
                del self._over[next(iter(self._over))]
            await sessions.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve until the end of the last of these contexts, and yield the address."""
        self._users += 1
        try:
            if self._server is None:
                self._start()
            yield self._url
        finally:
            self._users -= 1
            if not self._users and self._server is not None:
                server, self._server = self._server, None
                server.should_exit = True
                await asyncio.shield(self._serving)

    @asynccontextmanager
    async def serving_on(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve on a socket that listens elsewhere, too, such as in a container; it is closed at the end of the context."""
        server = Server(uvicorn.Config(self.app, **UVICORN))
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="gateway-elsewhere")
        try:
            yield
        finally:
            server.should_exit = True
            await asyncio.shield(serving)

    def _start(self) -> None:
        """Listen; connections wait until the server accepts them."""
        listener = listen(self._host, self._port, self._keys)
        self._server = Server(uvicorn.Config(self.app, **UVICORN))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="gateway")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{host}:{listener.getsockname()[1]}"

    def _make_app(self, further: Sequence[Route]) -> ASGIApp:
        handlers: list[tuple[str, Handler, list[str]]] = [
            *((dialect.path, partial(self._chat, dialect), ["POST"]) for dialect in DIALECTS),
            (f"{Messages.path}/count_tokens", self._count_tokens, ["POST"]),
            ("/v1/session/reward", set_reward, ["POST"]),
            (END_PATH, end_session, ["POST"]),
            ("/v1/session/observe", observe, ["POST"]),
            ("/v1/session/move", move, ["POST"]),
            ("/v1/models", self._models, ["GET"]),
            ("/v1/models/{model:path}", self._models, ["GET"]),
        ]
        routes = [
            Route(prefix + path, partial(self._handle, handler), methods=methods)
            for path, handler, methods in handlers
            for prefix in _PREFIXES
        ]
        every_method = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        other_paths = [
            Route(f"{prefix}/{{path:path}}", partial(self._handle, self._no_route), methods=every_method)
            for prefix in ("/s/{key}", "")
        ]
        chats = {dialect.path: partial(self._handle, partial(self._chat, dialect)) for dialect in DIALECTS}
        return _DirectRoutes(chats, Starlette(routes=[*further, *routes, *other_paths]))

    async def _handle(self, handler: Handler, http: Request) -> Response:
        """Answer an authenticated request, or return the error in the form of its dialect."""
        try:
            sessions = self._find_sessions(http)
            if isinstance(sessions, _SessionOver):
                return json_reply({"turns": sessions.turns})
            sessions.requested_at = time.monotonic()
            return await handler(http, sessions)
        except BadRequestError as error:
            message, status = error.message, error.status
        except HTTPException as error:
            message, status = error.detail, error.status_code
        except SessionOverError as error:
            message, status = str(error), 503
        except ClientDisconnect:
            return Response(status_code=CLOSED_REQUEST)
        # Clients of OpenAI and Anthropic obey the header: an episode that is over answers no retry.
        headers = {"x-should-retry": "false"} if status >= 500 else None
        return json_reply(_dialect(http).error(message, status), status, headers)

    def _find_sessions(self, http: Request) -> AgentSessions | _SessionOver:
        """Return the sessions whose key a request has; those that are over only for the repetition of their end.

        Raises:
            BadRequestError: it has no key, or that of no session, or of one that is over.
        """
        headers = read_headers(http)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        keys = (
            http.path_params.get("key"),
            token.strip() if scheme.lower() == "bearer" else None,
            headers.get("x-api-key"),
        )
        for key in keys:
            if key and (sessions := self._sessions.get(key)) is not None:
                return sessions
            if key and (over := self._over.get(key)) is not None:
                if over.turns is not None and http.url.path.endswith(END_PATH):
                    return over
                reason = f": it {over.why}" if over.why else ""
                raise BadRequestError(f"this session is over{reason}", 410)
        raise BadRequestError("the API key is that of no session", 401)

    async def _no_route(self, http: Request, sessions: AgentSessions) -> Response:
        paths = ", ".join(dialect.path for dialect in DIALECTS)
        raise BadRequestError(
            f"there is no {http.method} {http.url.path!r:.200} here; there are {paths}, /v1/models", 404
        )

    async def _models(self, http: Request, sessions: AgentSessions) -> Response:
        """Return the model list in the forms of OpenAI and Anthropic, whose fields differ."""
        agent = named_agent(http)
        names = sessions.models if agent is None else [sessions.choose(agent).model]
        if name := http.path_params.get("model"):
            sessions.choose(agent, name)
            return json_reply(_model(name))
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return json_reply({"object": "list", "data": [_model(name) for name in names], **ends})

    async def _count_tokens(self, http: Request, sessions: AgentSessions) -> Response:
        request = Messages().request(read_object(await read_body(http)))
        session = sessions.choose(named_agent(http), request.model)
        return json_reply({"input_tokens": session.count_tokens(request)})

    async def _chat(self, dialect: Dialect, http: Request, sessions: AgentSessions) -> Response:
        content = await read_body(http)
        try:
            request = dialect.request(read_object(content))
            session = sessions.choose(named_agent(http), request.model)
            headers = _ignored_header(session.ignored_fields(request))
            digest = hashlib.blake2b(dialect.path.encode() + content).digest()
            answer = self._answer(session, request, http, digest)
        except BadRequestError as error:
            sessions.refused = error.message
            raise
        client = partial(has_disconnected, http)
        answer.clients.append(client)
        try:
            if not answer.task.done():
                await asyncio.wait((answer.task,), timeout=self._keep_alive_s if request.stream else None)
            if answer.task.cancelled():
                raise SessionOverError(_OVER)
            if answer.task.done():
                reply = answer.task.result()
                if client():
                    return Response(status_code=CLOSED_REQUEST)
                answer.delivered = True
                if not request.stream:
                    return json_reply(dialect.reply(reply), headers=headers)
                # Whole: each event alone would be a write to the socket.
                content = b"".join(dialect.events(reply, usage=request.stream_usage))
                return Response(content, headers=headers | _STREAM_HEADERS, media_type=_STREAM)
        except BadRequestError as error:
            sessions.refused = error.message
            raise
        finally:
            answer.clients.remove(client)
        events = self._events(dialect, request, answer, client)
        return StreamingResponse(events, headers=headers | _STREAM_HEADERS, media_type=_STREAM)

    def _answer(self, session: Session, request: ChatRequest, http: Request, digest: bytes) -> Answer:
        """Return the answer to a request: that of the request which it repeats, or a new one."""
        headers = read_headers(http)
        key, count = headers.get("idempotency-key", ""), headers.get("x-stainless-retry-count", "")
        answer = session.answers.find(digest, key, int(count) if count.isdecimal() else None)
        if answer is None:
            answer = Answer(digest, key, session.submit(request))
            session.answers.add(answer)
            answer.task.add_done_callback(lambda task: session.answers.drop(answer) if _has_failed(task) else None)
        return answer

    async def _events(
        self, dialect: Dialect, request: ChatRequest, answer: Answer, client: Client
    ) -> AsyncIterator[bytes]:
        answer.clients.append(client)
        try:
            while not answer.task.done():
                yield _KEEP_ALIVE
                await asyncio.wait((answer.task,), timeout=self._keep_alive_s)
            try:
                reply = answer.task.result()
            except BadRequestError as error:
                yield dialect.error_event(error.message, error.status)
            except (SessionOverError, asyncio.CancelledError) as error:
                yield dialect.error_event(str(error) or _OVER, 503)
            else:
                yield b"".join(dialect.events(reply, usage=request.stream_usage))
                answer.delivered = True
        finally:
            answer.clients.remove(client)


class _DirectRoutes:
    """ASGI application that hands posts to some paths to their handlers; its router takes longer than they do.

    Args:
        handlers: by path.
        otherwise: gets all other requests.
    """

    def __init__(self, handlers: Mapping[str, Callable[[Request], Awaitable[Response]]], otherwise: ASGIApp) -> None:
        self._handlers = handlers
        self._otherwise = otherwise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._otherwise(scope, receive, send)
        else:
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)


def _model(name: str) -> Json:
    """Return a model of the list, for clients of OpenAI and of Anthropic."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


@dataclass(frozen=True, slots=True)
class _SessionOver:
    """Sessions of an episode that is over."""

    turns: int | None
    """The answer to a repeated end; None if the agent has not ended it."""
    why: str
    """Why its episode has failed; empty if it has not."""

    @classmethod
    def after(cls, sessions: AgentSessions) -> _SessionOver:
        return cls(sessions.turns if sessions.ended.done() else None, sessions.fault)


def make_key() -> str:
    """Return the key of a new session."""
    return f"sk-agentrl-{secrets.token_urlsafe(24)}"


def _dialect(http: Request) -> Dialect:
    """Return the dialect of a path, for errors; that of OpenAI if it has none."""
    return next((dialect for dialect in DIALECTS if dialect.path in http.url.path), DIALECTS[0])


def _has_failed(task: asyncio.Task[object]) -> bool:
    return task.cancelled() or task.exception() is not None


def _ignored_header(ignored: Sequence[Ignored]) -> dict[str, str]:
    """Return a header that says what of a request has no effect, and why."""
    if not ignored:
        return {}
    text = (
        "; ".join(map(str, ignored)).encode("ascii", "backslashreplace").decode().replace("\n", " ").replace("\r", " ")
    )
    return {"x-agentrl-ignored": text[:_HEADER_CHARACTERS]}
