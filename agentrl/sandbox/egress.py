"""Egress of a sandbox: an HTTP proxy in the server that connects to ``sandbox.hosts`` and to nothing else.

A sandbox has a private network with only a loopback. At its start, before any code of the policy runs, the runner listens
there on `ADDRESS` and hands the listening socket over to the server, through a Unix socket (`runner/snippet.py`). The
server accepts connections to it. No process inside forwards them, so none can be killed or taken over.

Requests to the proxy's own address, which clients send that use no proxy for the loopback, are forwarded to one host, if
`SandboxBackend.forward` has named one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from agentrl.core.errors import SandboxFailure

_log = logging.getLogger(__name__)

ADDRESS = ("127.0.0.1", 3128)
"""The proxy's address inside. `runner/snippet.py` has the same."""
HEAD_BYTES = 2**16
CONNECTIONS = 16
"""Concurrent connections of one sandbox, with two file descriptors each; further ones wait in the kernel's queue."""
RETRY_S = 1.0
"""Seconds until the next try to accept if this process has no file descriptor left."""
TLS_PORTS = frozenset({443, 8443})
"""Ports to which a tunnel may lead: it hides what it carries. Other ports are for plain HTTP requests, which are read."""
CONNECT_S = 30.0
"""Limit from a connection's start until the host is connected."""
CHUNK = 2**16
HOP_HEADERS = frozenset(
    {"connection", "host", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer", "upgrade"}
)
"""Headers that are not forwarded: those of one hop, and ``Host``, which is set again."""


def proxy_environment() -> dict[str, str]:
    """Return the environment variables that tell programs the proxy's address."""
    url = f"http://{own_address()}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, url), "no_proxy": "localhost,127.0.0.1,::1", "NO_PROXY": "localhost,127.0.0.1,::1"}


def receive_listener(channel: socket.socket) -> socket.socket:
    """Return the socket on which the runner listens, received over ``channel``. The runner must be ready.

    Raises:
        SandboxFailure: none arrives.
    """
    channel.settimeout(5.0)
    try:
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
        return socket.socket(fileno=fds[0])
    except (OSError, IndexError) as error:
        raise SandboxFailure(f"the runner gave no socket for sandbox.hosts: {error!r}") from error


_LENGTH = re.compile(r"[0-9]{1,18}")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rf"({_TOKEN}) ([!-~]+) HTTP/1\.[01]")
_HEADER = re.compile(rf"({_TOKEN}):([\t -~\x80-\xff]*)")
"""A line with a control character, a folded line, or a space before the colon does not match."""


class _RequestRefused(Exception):
    """The proxy rejects a request, with an HTTP status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class EgressProxy:
    """The proxy of one sandbox.

    Args:
        hosts: ``name:port`` each; see `SandboxConfig.hosts`.
        origin: ``name:port`` to which requests to the proxy's own address are forwarded; None: they are refused.
        key: where the hosts are listed, for messages.
    """

    def __init__(self, hosts: Sequence[str], origin: str | None = None, key: str = "sandbox.hosts") -> None:
        self._key = key
        self._hosts = {_parse_host_and_port(host, None) for host in hosts}
        self._origin = origin
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONNECTIONS)

    def permits(self, host: str, port: int) -> bool:
        """Return whether a host, in lower case, may be connected."""
        return (host, port) in self._hosts

    async def start(self, listener: socket.socket) -> None:
        """Serve connections to a listening socket, and take ownership of it."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="egress")

    async def close(self) -> None:
        """Stop listening and close all connections."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections while there are slots. `asyncio.start_server` has no limit on connections."""
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
                reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_BYTES)
            except OSError as error:
                self._slots.release()
                _log.warning("a connection of a sandbox cannot be accepted: %s", error)
                await asyncio.sleep(RETRY_S)
                continue
            except asyncio.CancelledError:
                self._slots.release()
                raise
            task = asyncio.create_task(self._serve(reader, writer), name="egress-connection")
            self._tasks.add(task)
            task.add_done_callback(partial(self._on_connection_end, writer))

    def _on_connection_end(self, writer: asyncio.StreamWriter, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        writer.close()
        self._slots.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._handle(reader, writer)
        except* (OSError, EOFError, asyncio.LimitOverrunError) as error:
            _log.debug("a connection of a sandbox ended: %r", error)

    def _absolute(self, target: str) -> str:
        """Return the URL of a request, which names the origin if it was sent to the proxy's own address."""
        own = f"http://{own_address()}/"
        if self._origin is None or not target.startswith(("/", own)):
            return target
        return f"http://{self._origin}/{target.removeprefix(own).removeprefix('/')}"

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, headers = _parse(head)
                target = self._absolute(target)
                host, port = _parse_host_and_port(target, None) if method == "CONNECT" else _parse_url_host(target)
                if not self.permits(host, port):
                    raise _RequestRefused("403 Forbidden", f"{host}:{port} is not in {self._key}")
                if method == "CONNECT" and port not in TLS_PORTS:
                    ports = " and ".join(map(str, sorted(TLS_PORTS)))
                    raise _RequestRefused("403 Forbidden", f"tunnels lead to the TLS ports {ports}, not to {port}")
                body = 0 if method == "CONNECT" else _body_length(headers)
                upstream_reader, upstream = await _connect(host, port)
        except (_RequestRefused, TimeoutError) as error:
            status = error.status if isinstance(error, _RequestRefused) else "408 Request Timeout"
            body_text = f"{error or 'too slow'}\n".encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body_text)}\r\nConnection: close\r\n\r\n".encode()
                + body_text
            )
            await writer.drain()
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _tunnel(reader, writer, upstream_reader, upstream)
            else:
                upstream.write(_request_head(method, target, headers).encode("latin-1"))
                # One request per connection: a second one could name another host at the same address.
                upload = asyncio.create_task(_copy(reader, upstream, body))
                try:
                    await _copy(upstream_reader, writer, None)
                finally:
                    upload.cancel()
                    await asyncio.gather(upload, return_exceptions=True)
        finally:
            upstream.close()


def own_address() -> str:
    """Return the proxy's address inside, as ``name:port``."""
    return f"{ADDRESS[0]}:{ADDRESS[1]}"


def _parse(head: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return method, target and headers. Whatever another parser may read differently is refused (RFC 9112, section 2.2)."""
    request_line, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    request, headers = _REQUEST.fullmatch(request_line), [_HEADER.fullmatch(line) for line in lines]
    if request is None or None in headers:
        raise _RequestRefused("400 Bad Request", "this is an HTTP proxy; control characters are refused")
    return request[1], request[2], [(header[1], header[2].strip(" \t")) for header in headers if header is not None]


def _parse_host_and_port(authority: str, default_port: int | None) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{authority}")
        port_number = url.port or default_port
    except ValueError as error:
        raise _RequestRefused("400 Bad Request", f"{authority!r}: {error}") from error
    if not url.hostname or port_number is None or url.netloc != authority or "@" in authority:
        raise _RequestRefused("400 Bad Request", f"{authority!r} is no name:port")
    return url.hostname.lower().rstrip("."), port_number


def _parse_url_host(url: str) -> tuple[str, int]:
    scheme, separator, authority_and_path = url.partition("://")
    if scheme.lower() != "http" or not separator:
        raise _RequestRefused("400 Bad Request", "only CONNECT and absolute URLs with http:// are supported")
    return _parse_host_and_port(_authority(authority_and_path), 80)


def _authority(authority_and_path: str) -> str:
    return authority_and_path.replace("?", "/", 1).split("/", 1)[0]


def _body_length(headers: list[tuple[str, str]]) -> int:
    names = [name.lower() for name, _ in headers]
    lengths = {value for name, value in headers if name.lower() == "content-length"}
    if "transfer-encoding" in names or len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise _RequestRefused("411 Length Required", "a body needs one Content-Length")
    return int(lengths.pop()) if lengths else 0


def _request_head(method: str, url: str, headers: list[tuple[str, str]]) -> str:
    authority_and_path = url.partition("://")[2]
    authority = _authority(authority_and_path)
    path = authority_and_path[len(authority) :]
    path = path if path.startswith("/") else f"/{path}"
    forwarded = [f"{name}: {value}" for name, value in headers if name.lower() not in HOP_HEADERS]
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {authority}", "Connection: close", *forwarded, "", ""])


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(host, port)
    except OSError as error:
        raise _RequestRefused("502 Bad Gateway", f"{host}:{port} cannot be reached: {error}") from error


async def _tunnel(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    upstream_reader: asyncio.StreamReader,
    upstream: asyncio.StreamWriter,
) -> None:
    async with asyncio.TaskGroup() as copies:
        copies.create_task(_copy(reader, upstream, None, end=True))
        copies.create_task(_copy(upstream_reader, writer, None, end=True))


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int | None, end: bool = False
) -> None:
    """Copy ``count`` bytes, or all (None); then, with ``end``, close the writing direction."""
    while count != 0:
        data = await reader.read(CHUNK if count is None else min(count, CHUNK))
        if not data:
            break
        writer.write(data)
        await writer.drain()
        count = None if count is None else count - len(data)
    if end:
        with contextlib.suppress(OSError):
            writer.write_eof()
