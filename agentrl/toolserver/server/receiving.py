"""Limits of requests that hold before the token is compared: size and time of headers, size of bodies."""

from __future__ import annotations

import asyncio

import h11
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.toolserver import request_limits


class ReceiveTimeout(H11Protocol):
    """uvicorn's HTTP/1.1, which ends a connection whose request does not arrive within `request_limits.RECEIVE_S`.

    uvicorn itself bounds only headers (``h11_max_incomplete_event_size``) and the time between two requests.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the deadline of the first request."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._cancel()

    def data_received(self, data: bytes) -> None:
        """Set the deadline of the rest of the request."""
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        """Set the deadline of the rest of a request that was answered early; between requests uvicorn has its own limit."""
        super().on_response_complete()
        self._set_deadline()

    def _set_deadline(self) -> None:
        is_between_requests = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        is_arriving = self.conn.their_state is h11.SEND_BODY or (
            self.conn.their_state is h11.IDLE and not is_between_requests
        )
        if self.transport.is_closing() or not is_arriving:
            self._cancel()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(request_limits.RECEIVE_S, self.transport.close)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class BodyLimit:
    """ASGI middleware that answers requests of more than `request_limits.BODY_BYTES` with 413.

    Args:
        app: the guarded application; it answers the `HTTPException` that reading a body without a length may raise.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count the bytes that are read of its body."""
        unread_bytes = request_limits.BODY_BYTES
        too_long = f"a request may have {unread_bytes} bytes"

        async def receive_within_limit() -> Message:
            nonlocal unread_bytes
            message = await receive()
            unread_bytes -= len(message.get("body", b""))
            if unread_bytes < 0:
                raise HTTPException(413, too_long)
            return message

        if scope["type"] == "http":
            length = Headers(scope=scope).get("content-length", "0")
            if not length.isdecimal() or len(length) > 20 or int(length) > unread_bytes:
                await JSONResponse({"error": too_long}, 413)(scope, receive, send)
                return
        await self._app(scope, receive_within_limit if scope["type"] == "http" else receive, send)
