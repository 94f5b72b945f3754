"""Access to a tool server: a bearer token, required unless the server listens on the loopback interface."""

from __future__ import annotations

import hmac
import ipaddress
import os
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.config.toolserver import ServerConfig
from agentrl.core.errors import ConfigError
from agentrl.toolserver import request_limits

TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"
"""Environment variable with the token, for configurations that should not hold it."""
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
    """Return the token that requests need, or None if they need none.

    Raises:
        ConfigError: ``host`` can be reached from other machines and there is no token; or the token can be guessed, or is not
            valid in a header.
    """
    token = os.environ.get(TOKEN_VARIABLE) if config.token is None else config.token
    if not token:
        if config.token is not None:
            raise ConfigError("server.token is empty")
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host or repr(host)} can be reached from other machines: set server.token, or {TOKEN_VARIABLE} in the "
                "environment, to the token that requests need; without one a server listens on 127.0.0.1 only"
            )
        return None
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            f"server.token ({TOKEN_VARIABLE}) must be printable ASCII without spaces to stand in a header"
        )
    shortest, longest = request_limits.TOKEN_CHARACTERS
    if not shortest <= len(token) <= longest:
        raise ConfigError(
            f"server.token ({TOKEN_VARIABLE}) has {len(token)} characters; use {shortest} to {longest} random ones, such as "
            "those of: openssl rand -hex 16"
        )
    return token


class BearerAuth:
    """ASGI middleware that refuses requests without ``Authorization: Bearer TOKEN``, but for ``/health``.

    Args:
        app: the guarded application.
        token: the token that requests need.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] != "http" or scope["path"] == OPEN_PATH or self._has_token(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = f"this server requires the header 'Authorization: Bearer TOKEN' with the token of {TOKEN_VARIABLE}"
        refusal = JSONResponse({"error": error}, 401, headers={"WWW-Authenticate": "Bearer"})
        await refusal(scope, receive, send)

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # In constant time, so that the token cannot be guessed byte by byte.
        return hmac.compare_digest(token.strip().encode(), self._token) and scheme.lower() == "bearer"


class SameOriginOnly:
    """ASGI middleware for servers without a token: refuses requests that a web page of another host may have sent.

    Such a page gives its host as ``Origin`` (CSRF). If its name resolves to the loopback (DNS rebinding), a GET has no
    ``Origin``, and ``Host`` is the page's.

    Args:
        app: the guarded application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 403."""
        fault = _foreign_origin_fault(Headers(scope=scope)) if scope["type"] == "http" else ""
        if not fault:
            await self._app(scope, receive, send)
            return
        await JSONResponse({"error": fault}, 403)(scope, receive, send)


def _foreign_origin_fault(headers: Headers) -> str:
    """Return why a request may come from a web page of another host; empty if it does not."""
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and not is_loopback(_host(origin)):
        return f"requests of web pages from {origin:.200} are refused"
    if not is_loopback(_host(f"//{host}")):
        return (
            f"this server has no token, and the request names the host {host:.200}: use 127.0.0.1 or localhost, or set "
            f"server.token ({TOKEN_VARIABLE})"
        )
    return ""


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
