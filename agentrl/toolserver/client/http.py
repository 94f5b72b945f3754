"""HTTP to one tool server, a thousand requests at a time."""

from __future__ import annotations

import ssl
from functools import cache

import httpx

PROBE_S = 5.0
"""Seconds that a connection, and ``GET /health``, may take."""
KEEP_S = 30.0
"""Seconds an idle connection is used again; servers keep theirs longer."""


class Wire:
    """Requests over connections that are used again, the last one first.

    httpx's pools look at each of their connections for every request, which at hundreds of them costs more than the
    request. So each connection is a transport of its own, and whichever is idle is taken.

    Args:
        url: the server's address.
        token: bearer token to send, if any.
        timeout_s: of a request that names no time of its own.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def send(
        self, method: str, path: str, content: bytes | None = None, *, timeout_s: float | None = None
    ) -> httpx.Response:
        """Send a request and return the whole reply.

        Raises:
            httpx.TransportError: no reply came, or not all of it.

        """
        timeout = httpx.Timeout(timeout_s or self._timeout_s, connect=PROBE_S).as_dict()
        request = httpx.Request(
            method, self._url + path, headers=self._headers, content=content, extensions={"timeout": timeout}
        )
        line = self._idle.pop() if self._idle else self._another()
        try:
            reply = await line.handle_async_request(request)
            await reply.aread()  # and so its connection is free
        except BaseException:
            self._all.discard(line)  # a reply that nobody has read may still come on it
            await line.aclose()
            raise
        self._idle.append(line)
        return reply

    def _another(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)
        # A proxy configured in the environment is not for tool servers.
        line = httpx.AsyncHTTPTransport(limits=limits, verify=_context(self._url.startswith("https")), trust_env=False)
        self._all.add(line)
        return line

    async def aclose(self) -> None:
        """Close all connections."""
        for line in list(self._all):
            await line.aclose()
        self._all.clear()
        self._idle.clear()


@cache
def _context(checked: bool) -> ssl.SSLContext:
    """Return the one context of all connections: making one takes tens of milliseconds."""
    return ssl.create_default_context() if checked else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
