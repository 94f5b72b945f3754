"""Connections that stay open, with one request at a time each: HTTP/1.1 for requests that are sent thousands of times a second.

aiohttp, which sends all other requests, takes several times the CPU time. Errors are of its classes, for the same reasons.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import quote, unquote, urlsplit

import aiohttp
import httptools
from aiohttp.client_reqrep import ConnectionKey
from typing_extensions import override

_PORTS = {"http": 80, "https": 443}
_PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
_LENGTHS = {b"content-length", b"transfer-encoding"}
"""Headers of replies that do not end with their connection."""
_CONTINUE = 200
"""Statuses below it announce that the reply follows."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A whole reply."""

    status: int
    headers: dict[bytes, bytes]
    """By name in lower case."""
    content: bytes


@dataclass(frozen=True, slots=True)
class _Server:
    """What an address specifies about a server."""

    host: str
    port: int
    context: ssl.SSLContext | None
    """Context of TLS; None: the connection is not encrypted."""
    path: str
    """Before that of a request."""
    headers: str
    """Headers of every request, each with its line end."""


@lru_cache(maxsize=1024)
def _read_address(url: str) -> _Server:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    name = f"[{host}]" if ":" in host else host
    headers = f"host: {name if port == _PORTS.get(parts.scheme) else f'{name}:{port}'}\r\n"
    headers += "accept: */*\r\nuser-agent: agentrl\r\ncontent-type: application/json\r\n"
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers += f"authorization: Basic {base64.b64encode(login.encode('latin-1')).decode()}\r\n"
    context = ssl.create_default_context() if parts.scheme == "https" else None
    return _Server(host, port, context, quote(parts.path, safe=_PATH_CHARACTERS), headers)


class _Connection(asyncio.Protocol):
    """An open connection, with at most one request in progress."""

    def __init__(self, pool: KeptConnections, url: str) -> None:
        self.url = url
        self.idle_since = 0.0
        """On the event loop's clock."""
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._reply: asyncio.Future[HttpReply] | None = None
        """Reply of the request in progress."""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._began = False
        """Whether the reply has a status and headers."""
        self._read_at = 0.0
        """When bytes of the reply came last, or its request was sent."""
        self._timer: asyncio.TimerHandle | None = None
        """Looks after `_read_at`. It is set once for many requests, and not for each."""

    @property
    def closed(self) -> bool:
        """Whether no further request can be sent."""
        return self._transport.is_closing()

    async def send(self, request: bytes) -> HttpReply:
        """Send a request, and return its reply; see `KeptConnections.post`."""
        reply: asyncio.Future[HttpReply] = self._loop.create_future()
        self._reply = reply
        self._read_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._read_at + self._pool.read_s, self._check_time)
        self._transport.write(request)
        try:
            return await reply
        except asyncio.CancelledError:
            if self._reply is reply:  # otherwise another request has the connection by now
                self.close()
            raise

    def close(self) -> None:
        """Close it, whatever is in progress."""
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()

    def _check_time(self) -> None:
        self._timer = None
        if self._reply is None or self._reply.done():
            return
        end = self._read_at + self._pool.read_s
        if self._loop.time() < end:
            self._timer = self._loop.call_at(end, self._check_time)
        else:
            self._fail(aiohttp.SocketTimeoutError("Timeout on reading data from socket"))

    def _fail(self, error: aiohttp.ClientError) -> None:
        reply, self._reply = self._reply, None
        if reply is not None and not reply.done():
            reply.set_exception(error)
        self.close()

    # Of asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._read_at = self._loop.time()
        if self._reply is None:
            self.close()  # no request has this reply
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(aiohttp.ClientPayloadError(f"the reply is not HTTP: {error}"))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._began and exc is None and not self._headers.keys() & _LENGTHS:
            self._finish()  # the end of the connection is that of the reply
        elif self._began:
            self._fail(aiohttp.ClientPayloadError("the connection was lost before the end of the reply"))
        elif isinstance(exc, OSError):
            self._fail(aiohttp.ClientOSError(*exc.args))
        else:
            self._fail(aiohttp.ServerDisconnectedError())
        self._pool.forget(self)

    # Of httptools.HttpResponseParser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the reply."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Take note that the reply has begun."""
        self._began = self._parser.get_status_code() >= _CONTINUE

    def on_body(self, content: bytes) -> None:
        """Take a part of the reply's content."""
        self._body.append(content)

    def on_message_complete(self) -> None:
        """Return the reply to its request."""
        if self._began:
            self._finish()
        else:
            self._headers = {}

    def _finish(self) -> None:
        reply, self._reply = self._reply, None  # another request may have the connection before this one's task runs
        if reply is None or reply.done():  # a second reply, or one that nothing waits for any more
            self.close()
            return
        content = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        reply.set_result(HttpReply(self._parser.get_status_code(), self._headers, content))
        self._headers, self._body, self._began = {}, [], False
        if self._parser.should_keep_alive():
            self._pool.keep(self)
        else:
            self.close()


class KeptConnections:
    """Connections to one server at a time, as many as there are requests. They belong to the event loop of the first one.

    Args:
        connect_s: seconds that a connection may take to open.
        read_s: seconds that may pass without a byte of a reply.
        keep_s: seconds that a connection without a request is kept.
    """

    def __init__(self, *, connect_s: float, read_s: float, keep_s: float) -> None:
        self.read_s = read_s
        """Seconds that may pass without a byte of a reply."""
        self.closed = False
        """Whether they were closed for good."""
        self._connect_s = connect_s
        self._keep_s = keep_s
        self._idle: list[_Connection] = []
        """The one that was used last at the end."""
        self._open: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        """Closes connections that were idle for too long."""

    async def post(self, url: str, path: str, content: bytes, headers: str = "") -> HttpReply:
        """Send JSON once, and return the reply, whatever its status.

        Args:
            url: of the server.
            path: below it.
            content: JSON.
            headers: of this request, each with its line end.

        Raises:
            aiohttp.ClientConnectionError: no connection, or it was lost before the reply began. It is a TimeoutError if it was
                not open within ``connect_s``, or nothing came for ``read_s``.
            aiohttp.ClientPayloadError: the connection was lost before the reply ended, or the reply is not HTTP.
        """
        server = _read_address(url)
        head = f"POST {server.path}{path} HTTP/1.1\r\n{server.headers}{headers}content-length: {len(content)}\r\n\r\n"
        connection = self._take_idle(url) or await self._connect(url, server)
        return await connection.send(b"".join((head.encode(), content)))

    def _take_idle(self, url: str) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.url == url and not connection.closed:
                return connection
            connection.close()
        return None

    async def _connect(self, url: str, server: _Server) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s) as timeout:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, url), server.host, server.port, ssl=server.context
                )
        except OSError as error:
            if timeout.expired():
                raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from None
            key = ConnectionKey(server.host, server.port, server.context is not None, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, error) from error
        self._open.add(connection)
        return connection

    def keep(self, connection: _Connection) -> None:
        """Keep a connection whose request has its reply."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._keep_s, self._close_unused)

    def _close_unused(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._keep_s
        unused = [connection for connection in self._idle if connection.idle_since <= oldest]
        self._idle = [connection for connection in self._idle if connection.idle_since > oldest]
        for connection in unused:
            connection.close()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + self._keep_s, self._close_unused)

    def forget(self, connection: _Connection) -> None:
        """Keep a connection that is lost no more."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._open):
            connection.close()
