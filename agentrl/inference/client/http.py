"""HTTP to an engine: JSON in and out, retries where the connection fails."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson

_RETRIES = 4
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


class Refused(Exception):
    """The engine answered with an error."""

    def __init__(self, status: int, words: str, *, lost: bool = False) -> None:
        """Keep the status and what the engine said; ``lost``: it is a router that has lost the engine."""
        super().__init__(f"HTTP {status}: {words}")
        self.status = status
        self.words = words
        self.lost = lost


class Transport:
    """Requests to one engine.

    httpx looks through all connections of a client for every request, which at hundreds of connections costs more than
    the request. So each of the requests that are under way at the same time has a client of its own, with one connection.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Remember where the engine is; nothing is sent yet."""
        self.url = url.rstrip("/")
        """May be set anew, where a server has come back at another address."""
        self._timeout = httpx.Timeout(timeout_s, connect=10.0)
        self._ssl: ssl.SSLContext | bool = ssl.create_default_context() if self.url.startswith("https") else False
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []
        """Those that no request uses now. The one used last comes next: its connection is most likely open still."""

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

    async def post(self, path: str, body: Any, *, key: str = "", retries: int = _RETRIES) -> Any:
        """Send ``body`` and return the reply's JSON (None where it has none); ``key`` picks the engine where a router
        comes first.

        ``retries`` is 0 for what an engine must not do twice.

        Raises:
            Refused: an error's status.
            httpx.HTTPError: no answer after all retries.
        """
        return _content(await self._send("POST", path, orjson.dumps(body), key, retries))

    async def get(self, path: str, *, retries: int = _RETRIES) -> Any:
        """As `post`, by GET."""
        return _content(await self._send("GET", path, None, "", retries))

    async def delete(self, path: str) -> Any:
        """As `post`, by DELETE."""
        return _content(await self._send("DELETE", path, None, ""))

    async def _send(
        self, method: str, path: str, content: bytes | None, key: str, retries: int = _RETRIES
    ) -> httpx.Response:
        headers = {"content-type": "application/json"}
        if key:
            headers[_ROUTING_KEY] = key
        for attempt in range(retries + 1):
            try:
                with self._client() as client:
                    return await client.request(method, self.url + path, content=content, headers=headers)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                if attempt == retries:
                    raise
                await asyncio.sleep(_BACKOFF_S * 2**attempt)
        raise AssertionError("the loop returns or raises")

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))


def _content(reply: httpx.Response) -> Any:
    if not reply.is_success:
        raise Refused(reply.status_code, _words(reply), lost=reply.headers.get(_ROUTER_ERROR) in _LOST)
    if reply.headers.get("content-type", "").startswith("application/json") and reply.content:
        return orjson.loads(reply.content)
    return None


def _words(reply: httpx.Response) -> str:
    """Return what the engine says of a refusal, out of whichever field it put it."""
    try:
        body = orjson.loads(reply.content)
    except orjson.JSONDecodeError:
        return reply.text[:500]
    found = body
    for name in ("error", "message"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return str(found)[:500]
