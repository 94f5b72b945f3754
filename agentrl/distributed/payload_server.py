"""Payloads of weight buckets that engines fetch over HTTP from the process that sends weights."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_CONNECT_S = 5.0
_POLL_S = 0.05


class Payload:
    """Bytes that are served at a URL."""

    def __init__(self, url: str, content: memoryview) -> None:
        self.url = url
        self.content = content
        self.fetched = threading.Event()
        """Set once all of it was sent."""


class PayloadServer:
    """Serves payloads from threads, at paths that cannot be guessed, as long as they are being sent.

    In the body of a request to SGLang a payload would be base64 in JSON, which several of its processes decode and copy.
    """

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``, an address of this machine.

        Raises:
            OSError: it is not one.
        """
        self.host = host
        self._payloads: dict[str, Payload] = {}
        self._server = _Server(host, self._payloads)
        name = f"[{host}]" if ":" in host else host
        self._address = f"http://{name}:{self._server.server_address[1]}"
        thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True, name="payloads")
        thread.start()

    @classmethod
    def towards(cls, url: str) -> PayloadServer:
        """Return a server on the address from which this machine reaches ``url``. Blocks.

        Raises:
            OSError: it is not reached.
        """
        address = urlsplit(url)
        with socket.create_connection((address.hostname or "", address.port or 80), _CONNECT_S) as connection:
            host: str = connection.getsockname()[0]
        return cls(host)

    @contextmanager
    def serve(self, content: memoryview) -> Iterator[Payload]:
        """Serve bytes in the block."""
        path = f"/{secrets.token_urlsafe(32)}"
        payload = self._payloads[path] = Payload(self._address + path, content)
        try:
            yield payload
        finally:
            del self._payloads[path]

    def close(self) -> None:
        """Stop. Blocks for a moment."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, payloads: dict[str, Payload]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.payloads = payloads
        super().__init__((host, 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        payload = self.server.payloads.get(self.path)
        if payload is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/octet-stream")
        self.send_header("content-length", str(len(payload.content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # an engine that ends; its request says so
            self.wfile.write(payload.content)
            payload.fetched.set()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: paths are secret."""
