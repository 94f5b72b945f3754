"""Guards of a tool server: a bearer token, required unless the server listens on the loopback interface, and limits.

The limits hold before the token is compared: size and time of headers, size of bodies.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.config.toolserver import ServerConfig
from agentrl.core.errors import ConfigError
from agentrl.toolserver import request_limits
from agentrl.toolserver.request_limits import TOKEN_VARIABLE
from agentrl.toolserver.server.joined_writes import JoinedWrites

_HEAD_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

OPEN_PATH = "/health"
"""The one path that needs no token."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on ``host``; of names only localhost counts."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def server_token(config: ServerConfig, host: str) -> str | None:
    """Return the token that requests to a tool server need, or None if they need none.

    Raises:
        ConfigError: see `required_token`.
    """
    return required_token(config.token, host, key="server.token", variable=TOKEN_VARIABLE)


def required_token(
    token: str | None, host: str, *, key: str | None, variable: str, host_option: str = "--host "
) -> str | None:
    """Return the token that requests need, or None if they need none.

    Args:
        token: that of the configuration; None takes that of the environment.
        host: the address that the server listens on.
        key: of the configuration; None if it has none.
        variable: of the environment.
        host_option: what sets ``host``, for messages.

    Raises:
        ConfigError: ``host`` can be reached from other machines and there is no token; or the token can be guessed, or is not
            valid in a header.
    """
    name = f"{key} ({variable})" if key else variable
    value = os.environ.get(variable) if token is None else token
    if not value:
        if token is not None:
            raise ConfigError(f"{key} is empty")
        if not is_loopback(host):
            option = f"{key}, or {variable} in the environment," if key else f"{variable} in the environment"
            raise ConfigError(
                f"{host_option}{host or repr(host)} can be reached from other machines: set {option} to the token that requests "
                "need; without one a server listens on 127.0.0.1 only"
            )
        return None
    if not (value.isascii() and value.isprintable() and " " not in value):
        raise ConfigError(f"{name} must be printable ASCII without spaces to stand in a header")
    shortest, longest = request_limits.TOKEN_CHARACTERS
    if not shortest <= len(value) <= longest:
        raise ConfigError(
            f"{name} has {len(value)} characters; use {shortest} to {longest} random ones, such as those of: openssl rand -hex 16"
        )
    return value


Refusal = Callable[[str, Headers], Response | None]
"""Returns the refusal of a request to a path with headers; None passes it on."""


class Guard:
    """ASGI middleware that refuses requests.

    Args:
        app: the guarded application.
        fault: `other_origin`, or that of a token; see `token_required`.
    """

    def __init__(self, app: ASGIApp, fault: Refusal) -> None:
        self._app = app
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with the refusal."""
        refusal = self._fault(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


def token_required(token: str, variable: str = TOKEN_VARIABLE) -> Refusal:
    """Return what refuses requests without ``Authorization: Bearer TOKEN`` with 401, except ``/health``.

    Args:
        token: that they need.
        variable: of the environment that has it, for the message.
    """

    def refusal(path: str, headers: Headers) -> JSONResponse | None:
        scheme, _, sent_token = headers.get("authorization", "").partition(" ")
        # In constant time, so that the token cannot be guessed byte by byte.
        has_token = hmac.compare_digest(sent_token.strip().encode(), token.encode()) and scheme.lower() == "bearer"
        if path == OPEN_PATH or has_token:
            return None
        error = f"this server requires the header 'Authorization: Bearer TOKEN' with the token of {variable}"
        return JSONResponse({"error": error}, 401, headers={"WWW-Authenticate": "Bearer"})

    return refusal


def other_origin(path: str, headers: Headers, setting: str = f"server.token ({TOKEN_VARIABLE})") -> JSONResponse | None:
    """Refuse requests that a web page of another host may have sent with 403; for servers without a token.

    Such a page gives its host as ``Origin`` (CSRF). If its name resolves to the loopback (DNS rebinding), a GET has no
    ``Origin``, and ``Host`` is the page's. ``setting`` is what gives the server a token.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and not is_loopback(_host(origin)):
        return JSONResponse({"error": f"requests of web pages from {origin:.200} are refused"}, 403)
    if is_loopback(_host(f"//{host}")):
        return None
    fault = f"this server has no token, and the request names the host {host:.200}: use 127.0.0.1 or localhost, or set "
    return JSONResponse({"error": f"{fault}{setting}"}, 403)


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with limits of a request's head and of the time in which it arrives.

    A connection is closed whose request does not arrive within `request_limits.RECEIVE_S`, and after
    `request_limits.HEAD_BYTES` of a head, of trailers, or of a chunk's line, counted in whole reads from the socket. uvicorn
    itself bounds only the time between two requests.
    """

    _deadline: asyncio.TimerHandle | None = None
    _unparsed_bytes = 0
    """Read since the last event of the parser."""
    _has_event = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the deadline of the first request."""
        super().connection_made(transport)
        self.transport = JoinedWrites(transport, self.loop)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline."""
        super().connection_lost(exc)
        self._cancel_deadline()

    def data_received(self, data: bytes) -> None:
        """Parse, and close the connection if a head does not end."""
        self._has_event = False
        super().data_received(data)
        self._unparsed_bytes = 0 if self._has_event else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > request_limits.HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_HEAD_TOO_LONG)
            self.transport.close()

    def on_message_begin(self) -> None:
        """Set the deadline of a request."""
        self._has_event = True
        super().on_message_begin()
        self._set_deadline()

    def on_headers_complete(self) -> None:
        """Note the end of a head."""
        self._has_event = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Note a part of a body."""
        self._has_event = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Cancel the deadline of a request that has arrived."""
        self._has_event = True
        super().on_message_complete()
        self._cancel_deadline()

    def _set_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(request_limits.RECEIVE_S, self.transport.close)

    def _cancel_deadline(self) -> None:
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
