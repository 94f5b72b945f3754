"""A Docker daemon without containers: HTTP over a Unix socket, and what it was told in dictionaries.

It knows the calls that opening, finding and removing machines makes. Commands do not run in it. `FakeDaemon.stop` loses it, and
a second `FakeDaemon.start` on the same socket has all again.
"""

from __future__ import annotations

import json
import re
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Reply = tuple[int, Any]


class FakeDaemon:
    """One daemon.

    Args:
        socket: where it listens.
        runtimes: names of its runtimes.
    """

    def __init__(self, socket: Path, *, runtimes: tuple[str, ...] = ("runc",)) -> None:
        self.url = f"unix://{socket}"
        self.containers: dict[str, dict[str, Any]] = {}
        """By id."""
        self.volumes: dict[str, dict[str, Any]] = {}
        """By name."""
        self.most_machines = 0
        """At a time."""
        self.info_fields: dict[str, Any] = {}
        """Of ``GET /info``, in place of its own."""
        self.runtimes = runtimes
        self._socket = socket
        self._lock = threading.Lock()
        self._server: socketserver.ThreadingUnixStreamServer | None = None

    def start(self) -> None:
        """Listen."""
        self._socket.unlink(missing_ok=True)
        self._server = _Server(str(self._socket), _handler(self))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Answer no more, also on connections that are open."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._socket.unlink(missing_ok=True)

    @property
    def is_running(self) -> bool:
        """Whether it answers."""
        return self._server is not None

    @property
    def machines(self) -> list[str]:
        """Keys of the machines that it has, in the order in which they were made."""
        return [container["Labels"]["agentrl.key"] for container in self.containers.values()]

    def answer(self, method: str, target: str, body: Any) -> Reply:
        """Return status and body for a request."""
        parts = urlsplit(target)
        path, query = re.sub(r"^/v[0-9.]+", "", unquote(parts.path)), parse_qs(parts.query)
        labels = json.loads(query.get("filters", ["{}"])[0]).get("label", [])
        for pattern, function in _ROUTES.items():
            if (match := re.fullmatch(pattern, f"{method} {path}")) is not None:
                with self._lock:
                    return function(self, *match.groups(), query=query, labels=labels, body=body)
        return 501, {"message": f"{method} {path} is not faked"}

    def version(self, **_: Any) -> Reply:
        return 200, {"ApiVersion": "1.41", "Version": "20.10", "Os": "linux"}

    def info(self, **_: Any) -> Reply:
        limits = dict.fromkeys(("MemoryLimit", "PidsLimit", "CpuCfsQuota", "IPv4Forwarding"), True)
        times = {"SystemTime": datetime.now(UTC).isoformat()}
        return 200, {
            **limits,
            **times,
            "KernelVersion": "6",
            "Runtimes": {name: {} for name in self.runtimes},
            "ID": self.url,
            **self.info_fields,
        }

    def image(self, name: str, **_: Any) -> Reply:
        return 200, {"Id": f"sha256:{name}", "Config": {}}

    def nothing(self, **_: Any) -> Reply:
        return 200, []

    def list_containers(self, *, labels: list[str], **_: Any) -> Reply:
        return 200, [container for container in self.containers.values() if _matches(container["Labels"], labels)]

    def create_container(self, *, query: dict[str, list[str]], body: Any, **_: Any) -> Reply:
        name = f"/{query['name'][0]}"
        if any(container["Names"] == [name] for container in self.containers.values()):
            return 409, {"message": f"the name {name} is taken"}
        container_id = uuid.uuid4().hex
        summary = {"Id": container_id, "Names": [name], "Image": body["Image"], "State": "created"}
        self.containers[container_id] = {**summary, "Created": int(time.time()), "Labels": body["Labels"]}
        self.most_machines = max(self.most_machines, len(self.containers))
        return 201, {"Id": container_id, "Warnings": []}

    def start_container(self, container_id: str, **_: Any) -> Reply:
        self.containers[container_id]["State"] = "running"
        return 204, None

    def inspect_container(self, container_id: str, **_: Any) -> Reply:
        container = self.containers.get(container_id)
        if container is None:
            return 404, {"message": "no such container"}
        is_running = container["State"] == "running"
        state = {"Status": container["State"], "Running": is_running, "ExitCode": 0, "Error": "", "OOMKilled": False}
        return 200, {"Id": container_id, "Name": container["Names"][0], "State": {**state, "Pid": 1}}

    def remove_container(self, name: str, **_: Any) -> Reply:
        for container_id, container in list(self.containers.items()):
            if name in (container_id, container["Names"][0].removeprefix("/")):
                del self.containers[container_id]
                return 204, None
        return 404, {"message": "no such container"}

    def list_volumes(self, *, labels: list[str], **_: Any) -> Reply:
        return 200, {"Volumes": [volume for volume in self.volumes.values() if _matches(volume["Labels"], labels)]}

    def create_volume(self, *, body: Any, **_: Any) -> Reply:
        self.volumes[body["Name"]] = {"Name": body["Name"], "Labels": body["Labels"]}
        return 201, self.volumes[body["Name"]]

    def remove_volume(self, name: str, **_: Any) -> Reply:
        return (204, None) if self.volumes.pop(name, None) else (404, {"message": "no such volume"})


_ROUTES: dict[str, Callable[..., Reply]] = {
    "GET /version": FakeDaemon.version,
    "GET /info": FakeDaemon.info,
    "GET /images/json": FakeDaemon.nothing,
    "GET /images/(.*)/json": FakeDaemon.image,
    "GET /networks": FakeDaemon.nothing,
    "GET /containers/json": FakeDaemon.list_containers,
    "POST /containers/create": FakeDaemon.create_container,
    "POST /containers/([^/]*)/start": FakeDaemon.start_container,
    "GET /containers/([^/]*)/json": FakeDaemon.inspect_container,
    "DELETE /containers/([^/]*)": FakeDaemon.remove_container,
    "GET /volumes": FakeDaemon.list_volumes,
    "POST /volumes/create": FakeDaemon.create_volume,
    "DELETE /volumes/([^/]*)": FakeDaemon.remove_volume,
}


def _matches(labels: dict[str, str], selected: list[str]) -> bool:
    pairs = [label.partition("=") for label in selected]
    return all(name in labels and (not equal or labels[name] == value) for name, equal, value in pairs)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128


def _handler(daemon: FakeDaemon) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            if not daemon.is_running:
                self.close_connection = True
                return
            status, answer = daemon.answer(self.command, self.path, body)
            content = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            if status != 204:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _reply

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def fake_daemon(socket: Path, **options: Any) -> Iterator[FakeDaemon]:
    """Run a daemon that answers at a socket."""
    daemon = FakeDaemon(socket, **options)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()
