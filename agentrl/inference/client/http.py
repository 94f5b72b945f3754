"""HTTP to an engine or a router: JSON in and out, repeated if the connection fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson

RETRIES = 4
"""Further attempts if a connection fails."""
_BACKOFF_S = 0.1
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


class ConnectionPool:
    """Connections to one engine or router.

    httpx searches all connections of a client for every request, which with hundreds of connections costs more than the
    request (encode/httpx#3215). So each concurrent request has a client with a single connection.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Remember the address; nothing is sent yet."""
        self.url = url.rstrip("/")
        """May change, if a server comes back at another address."""
        self._timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._ssl: ssl.SSLContext | bool = ssl.create_default_context() if self.url.startswith("https") else False
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        """Idle clients. The one used last is taken first: its connection is most likely still open."""

    @contextmanager
    def _client(self) -> Iterator[httpx.AsyncClient]:
        if not self._free:
            limits = httpx.Limits(keepalive_expiry=30.0)
            # An engine is never behind the environment's proxy.
            client = httpx.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False, verify=self._ssl)
            self._clients.append(client)
            self._free.append(client)
        client = self._free.pop()
        try:
            yield client
        finally:
            self._free.append(client)

    async def request(self, method: str, path: str, body: Any = None, *, key: str = "", retries: int = RETRIES) -> Any:
        """Send ``body`` as JSON and return the reply's JSON, None if it has none.

        Args:
            method: HTTP method.
            path: below the address.
            body: JSON-able; None sends nothing.
            key: routing key by which ``sglang-router`` picks the engine.
            retries: further attempts if the connection fails; 0 for what an engine must not do twice.

        Raises:
            ErrorReply: the status is an error.
            httpx.HTTPError: no reply after all attempts.
        """
        headers = {"content-type": "application/json", **({_ROUTING_KEY: key} if key else {})}
        content = None if body is None else orjson.dumps(body)
        for attempt in range(retries + 1):
            try:
                with self._client() as client:
                    reply = await client.request(method, self.url + path, content=content, headers=headers)
                    break
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if attempt == retries:
                    raise
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
        if not reply.is_success:
            lost = reply.headers.get(_ROUTER_ERROR) in _LOST
            raise ErrorReply(reply.status_code, _error_message(reply), engine_lost=lost)
        if reply.headers.get("content-type", "").startswith("application/json") and reply.content:
            return orjson.loads(reply.content)
        return None

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))


def _error_message(reply: httpx.Response) -> str:
    """Return the message of an error reply, from whichever field holds it."""
    try:
        body = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return reply.text[:500]
    found = body
    for name in ("error", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return str(found)[:500]
