"""HTTP to an engine or a router: generations over connections that stay open, all other requests by aiohttp."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import orjson

from agentrl.inference.client.connections import KeptConnections

RETRIES = 4
"""Further attempts if a connection fails before the reply begins."""
CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError)
"""Errors of a request without a whole reply."""
_NOT_IN_HEADERS = frozenset("\r\n\0")
_ERROR_STATUS = 400
_BACKOFF_S = 0.1
_CONNECT_S = 10.0
_KEEP_S = 30.0
"""Seconds an idle connection of generations is kept."""
_KEEP_CONTROL_S = 2.0
"""Seconds that of other requests is kept: less than the 5 s after which SGLang closes it. A request on a connection that the
engine closes at that moment fails, and some must not be sent a second time."""
# Of sglang-router 0.3.
_ROUTING_KEY = "x-smg-routing-key"
_ROUTER_ERROR = "x-smg-error-code"
_LOST = {
    "call_upstream_body_error",
    "call_upstream_connection_failed",
    "call_upstream_request_error",
    "call_upstream_request_failed",
    "no_available_workers",
    "read_response_body_failed",
}


class ErrorReply(Exception):
    """The engine replied with an error status."""

    def __init__(self, status: int, message: str, *, engine_lost: bool = False) -> None:
        """Keep the status and the engine's message; ``engine_lost``: a router could not reach the engine."""
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message
        self.engine_lost = engine_lost


class EngineHttp:
    """Requests to one engine or router; belongs to the event loop of the first request."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Remember the address, and the seconds that a reply may take; nothing is sent yet."""
        self.url = url.rstrip("/")
        """May change, if a server comes back at another address."""
        self._timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._connections = KeptConnections(connect_s=_CONNECT_S, read_s=timeout_s, keep_s=_KEEP_S)

    async def generate(self, body: Mapping[str, object], *, key: str) -> bytes:
        """Send the body of a generation as JSON, and return the content of the reply.

        Args:
            body: JSON-able.
            key: routing key from which ``sglang-router`` picks the engine.

        Raises:
            ErrorReply: the status is an error.
            aiohttp.ClientError, TimeoutError: no reply after all attempts; see `CONNECTION_ERRORS`.
        """
        content = orjson.dumps(body)
        if not _NOT_IN_HEADERS.isdisjoint(key):
            raise ValueError(f"key={key!r} has a character that no header can have")
        header = f"{_ROUTING_KEY}: {key}\r\n"
        for attempt in itertools.count():
            try:
                reply = await self._connections.post(self.url, "/generate", content, header)
                break
            except aiohttp.ClientConnectionError as error:
                if isinstance(error, TimeoutError) or attempt == RETRIES:
                    raise
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
                if self._connections.closed:
                    raise
        if reply.status >= _ERROR_STATUS:
            code = reply.headers.get(_ROUTER_ERROR.encode(), b"").decode("latin-1")
            raise _error_reply(reply.status, reply.content, code)
        return reply.content

    def request(
        self, method: str, path: str, body: Any = None, *, key: str = "", once: bool = False
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return the context manager of a request, which sends ``body`` as JSON and yields the reply.

        Args:
            method: HTTP method.
            path: below the address.
            body: JSON-able; None sends nothing.
            key: routing key from which ``sglang-router`` picks the engine.
            once: never send it a second time, even if the connection fails.

        Raises:
            ErrorReply: the status is an error.
            aiohttp.ClientError, TimeoutError: no reply after all attempts; see `CONNECTION_ERRORS`.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_CONTROL_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"content-type": "application/json"},
                raise_for_status=_raise_error_reply,
                timeout=self._timeout,
            )
        return self._session.request(
            method,
            self.url + path,
            data=None if body is None else orjson.dumps(body),
            headers={_ROUTING_KEY: key} if key else None,
            allow_redirects=False,
            middlewares=() if once else (self._send_again,),
        )

    async def _send_again(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        for attempt in itertools.count():
            try:
                return await send(request)
            except aiohttp.ClientConnectionError as error:
                if isinstance(error, TimeoutError) or attempt == RETRIES:
                    raise
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
                if self._session is None or self._session.closed:
                    raise
        raise AssertionError("the loop returns or raises")

    async def aclose(self) -> None:
        """Close all connections."""
        self._connections.close()
        if self._session is not None:
            await self._session.close()


async def _raise_error_reply(reply: aiohttp.ClientResponse) -> None:
    """Raise `ErrorReply` if the status is an error."""
    if not reply.ok:
        raise _error_reply(reply.status, await reply.read(), reply.headers.get(_ROUTER_ERROR, ""))


def _error_reply(status: int, content: bytes, router_error: str) -> ErrorReply:
    """Return the error with the engine's message, from whichever field holds it."""
    try:
        message = orjson.loads(content)
        for name in ("error", "message"):
            message = message.get(name, message) if isinstance(message, dict) else message
    except orjson.JSONDecodeError:
        message = content.decode(errors="replace")
    return ErrorReply(status, str(message)[:500], engine_lost=router_error in _LOST)


async def read_json(reply: aiohttp.ClientResponse) -> Any:
    """Return a reply's JSON, None if it has none."""
    content = await reply.read()
    return orjson.loads(content) if content and reply.content_type == "application/json" else None
