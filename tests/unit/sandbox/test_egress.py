"""The way out of a sandbox: the listed hosts by the proxy, nothing else, and nothing inside that could change it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from deadlines import run_ready_tasks, until

from agentrl.core.types import ToolStatus
from agentrl.sandbox import egress
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Sandbox
from agentrl.sandbox.egress import EgressProxy
from tests.unit.sandbox.bubblewraps import other_backend


class Echo(BaseHTTPRequestHandler):
    """Echoes the request."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        received = {"path": self.path, "headers": dict(self.headers), "body": body.decode(), "method": self.command}
        answer = json.dumps(received).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """A web server's port on the machine's loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def talk(hosts: list[str], *requests: bytes) -> list[bytes]:
    """Send each request to a proxy over a separate connection; return the whole response."""

    async def one(port: int, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return answer

    async def main() -> list[bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        proxy = EgressProxy(hosts)
        await proxy.start(listener)
        try:
            return list(await asyncio.gather(*(one(port, request) for request in requests)))
        finally:
            await proxy.close()

    return asyncio.run(main())


def received(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    record: dict[str, Any] = json.loads(body)
    return record


def test_a_request_reaches_its_host_as_from_a_client(echo: int) -> None:
    host = f"127.0.0.1:{echo}"
    get, post = talk(
        [host],
        f"GET http://{host}/a?b=c HTTP/1.1\r\nHost: evil\r\nProxy-Authorization: x\r\nX-A: b\r\n\r\n".encode(),
        f"POST HTTP://{host} HTTP/1.1\r\nContent-Length: 4\r\n\r\nbodyGET / HTTP/1.1\r\nHost: evil\r\n\r\n".encode(),
    )
    assert received(get)["path"] == "/a?b=c"
    assert received(get)["headers"] == {"Host": host, "Connection": "close", "X-A": "b"}
    assert (received(post)["path"], received(post)["method"], received(post)["body"]) == ("/", "POST", "body"), (
        "one request alone"
    )


@pytest.fixture
def tunnels(echo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The web server's port is one for TLS."""
    monkeypatch.setattr(egress, "TLS_PORTS", frozenset({echo}))


@pytest.mark.usefixtures("tunnels")
def test_a_tunnel_passes_bytes_both_ways(echo: int) -> None:
    host = f"127.0.0.1:{echo}"
    request = f"CONNECT {host} HTTP/1.1\r\n\r\nGET /in HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    (answer,) = talk([host], request.encode())
    established, _, first_bytes = answer.partition(b"\r\n\r\n")
    assert established == b"HTTP/1.1 200 Connection established"
    assert received(first_bytes)["path"] == "/in"


REFUSED = {
    "another port": ("CONNECT 127.0.0.1:{other} HTTP/1.1", 403),
    "another name": ("CONNECT localhost:{port} HTTP/1.1", 403),
    "another port by http": ("GET http://127.0.0.1:{other}/ HTTP/1.1", 403),
    "the usual port": ("GET http://127.0.0.1/ HTTP/1.1", 403),
    "a user in front": ("GET http://127.0.0.1:{port}@localhost:{port}/ HTTP/1.1", 400),
    "a user before the listed host": ("GET http://user@127.0.0.1:{port}/ HTTP/1.1", 400),
    "a tunnel to a port that is not for TLS": ("CONNECT 127.0.0.1:{port} HTTP/1.1", 403),
    "https without a tunnel": ("GET https://127.0.0.1:{port}/ HTTP/1.1", 400),
    "a path": ("GET / HTTP/1.1", 400),
    "no port": ("CONNECT 127.0.0.1 HTTP/1.1", 400),
    "no number": ("CONNECT 127.0.0.1:x HTTP/1.1", 400),
    "a path in a tunnel": ("CONNECT 127.0.0.1:{port}/x HTTP/1.1", 400),
    "chunks": ("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
    "two lengths": ("POST http://127.0.0.1:{port}/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 411),
    "a length that Python reads as no number": (
        f"POST http://127.0.0.1:{{port}}/ HTTP/1.1\r\nContent-Length: {'1' * 5000}",
        411,
    ),
    "no HTTP": ("SSH-2.0-OpenSSH", 400),
    "a broken header": ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nbroken", 400),
    "a header that a line feed hides": (
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX: a\nTransfer-Encoding: chunked",
        400,
    ),
    "a request that line feeds hide": (
        "GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX: a\n\nGET /b HTTP/1.1\nHost: evil",
        400,
    ),
    "a line feed in the target": ("GET http://127.0.0.1:{port}/\nHost:evil HTTP/1.1", 400),
    "a tab for a space": ("GET\thttp://127.0.0.1:{port}/ HTTP/1.1", 400),
    "a folded header": ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX: a\r\n Content-Length: 9", 400),
    "a space before the colon": ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nContent-Length : 9", 400),
    "a name that is no token": ("GET http://127.0.0.1:{port}/ HTTP/1.1\r\nX(y): 9", 400),
    "no method": (" http://127.0.0.1:{port}/ HTTP/1.1", 400),
    "another version": ("GET http://127.0.0.1:{port}/ HTTP/1.10", 400),
}
CONTROLS = [chr(number) for number in (*range(0x20), 0x7F) if chr(number) != "\t"]


def test_no_control_character_passes(echo: int) -> None:
    """In the request line, in a header's name and in its value."""
    host = f"127.0.0.1:{echo}"
    requests = [
        line.encode() + b"\r\n\r\n"
        for control in CONTROLS
        for line in (
            f"GET http://{host}/a{control}b HTTP/1.1",
            f"GET http://{host}/ HTTP/1.1\r\nX{control}Y: 1",
            f"GET http://{host}/ HTTP/1.1\r\nX: 1{control}Y: 2",
        )
    ]
    for request, answer in zip(requests, talk([host], *requests), strict=True):
        assert answer.startswith(b"HTTP/1.1 400 "), (request, answer)


def test_connections_are_accepted_only_while_there_are_slots(echo: int) -> None:
    """Idle ones beyond the limit wait in the kernel, and take no file descriptor of the server."""

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        proxy = EgressProxy([f"127.0.0.1:{echo}"])
        await proxy.start(listener)
        port, paths_before = listener.getsockname()[1], len(os.listdir("/proc/self/fd"))
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        await run_ready_tasks()
        assert len(os.listdir("/proc/self/fd")) - paths_before - len(idle) <= egress.CONNECTIONS
        for _, writer in idle[: egress.CONNECTIONS + 50]:
            writer.transport.abort()
        reader, writer = idle[-1]
        writer.write(f"GET http://127.0.0.1:{echo}/late HTTP/1.1\r\n\r\n".encode())
        for _, connection in idle[:-1]:
            connection.transport.abort()
        assert received(await asyncio.wait_for(reader.read(), 10))["path"] == "/late"
        writer.transport.abort()
        await proxy.close()
        # Closed transports, and the web server's thread, give their descriptors back a moment later.
        await until(lambda: len(os.listdir("/proc/self/fd")) < paths_before)

    asyncio.run(main())


@pytest.mark.usefixtures("tunnels")
def test_a_tunnel_to_a_tls_port_is_no_way_to_another_host(echo: int) -> None:
    (answer,) = talk([f"127.0.0.1:{echo}"], f"CONNECT localhost:{echo} HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("name", REFUSED)
def test_all_else_is_refused(echo: int, name: str) -> None:
    request, status = REFUSED[name]
    line = request.format(port=echo, other=echo + 1 if echo < 65535 else echo - 1)
    (answer,) = talk([f"127.0.0.1:{echo}"], f"{line}\r\n\r\n".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def test_a_host_that_is_not_there_is_a_bad_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        host = f"127.0.0.1:{closed.getsockname()[1]}"
    (answer,) = talk([host], f"GET http://{host}/ HTTP/1.1\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 502 ")


def test_names_are_compared_as_names(echo: int) -> None:
    (answer,) = talk([f"LocalHost:{echo}"], f"GET http://LOCALHOST.:{echo}/ HTTP/1.1\r\n\r\n".encode())
    assert received(answer)["path"] == "/"


def in_sandbox(
    hosts: list[str], use: Callable[[Sandbox], Awaitable[None]], without: frozenset[Defence] = frozenset()
) -> None:
    async def main() -> None:
        async with other_backend(ALL_DEFENCES - without, hosts=hosts) as backend, await backend.open("a") as sandbox:
            await use(sandbox)

    asyncio.run(main())


FETCH = "import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:{}/x', timeout=9).read().decode())"
BY_PROXY = "import os\nfor name in ('no_proxy', 'NO_PROXY'): del os.environ[name]\n" + FETCH


def test_code_reaches_the_listed_host_and_no_other(echo: int) -> None:
    async def use(sandbox: Sandbox) -> None:
        outcome = await sandbox.run(Job("1", code=BY_PROXY.format(echo)))
        assert json.loads(outcome.stdout)["path"] == "/x", outcome
        assert "403" in (await sandbox.run(Job("2", code=BY_PROXY.format(echo + 1)))).stderr
        assert "refused" in (await sandbox.run(Job("3", code=FETCH.format(echo)))).stderr, "not past the proxy"
        # No process inside has the listener: it cannot be taken over, killed or swept away.
        take = "import socket\nsocket.create_server(('127.0.0.1', 3128))"
        assert "in use" in (await sandbox.run(Job("4", code=take))).stderr
        await sandbox.run(Job("5", argv=("sh", "-c", "kill -9 -1")))
        assert (await sandbox.run(Job("6", code=BY_PROXY.format(echo)))).status is ToolStatus.OK
        assert (await sandbox.run(Job("7", code="import os; print(os.listdir('/proc/self/fd'))"))).stdout.count(
            "'"
        ) == 8

    in_sandbox([f"127.0.0.1:{echo}"], use)


@pytest.mark.usefixtures("tunnels")
def test_a_close_ends_connections_that_are_open(echo: int) -> None:
    async def use(sandbox: Sandbox) -> None:
        connect = "import socket\ns = socket.create_connection(('127.0.0.1', 3128))\n"
        tunnel = f"s.send(b'CONNECT 127.0.0.1:{echo} HTTP/1.1\\r\\n\\r\\n')\nprint(s.recv(99))\ns.recv(99)"
        call = asyncio.create_task(sandbox.run(Job("1", code=connect + tunnel)))
        # The proxy copies in both directions: the tunnel is open.
        await until(lambda: sum("_copy" in repr(task.get_coro()) for task in asyncio.all_tasks()) == 2)
        await asyncio.wait_for(sandbox.close(), 5)
        await asyncio.gather(call, return_exceptions=True)
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [task for task in other_tasks if "EgressProxy" in repr(task.get_coro())]

    in_sandbox([f"127.0.0.1:{echo}"], use)
