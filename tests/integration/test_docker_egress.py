"""The way out of Docker sandboxes: the listed hosts by the proxy in the server, and nothing else."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dockerd import DockerHost

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import ConfigError
from agentrl.sandbox.base import Job, Outcome
from agentrl.sandbox.docker.backend import DockerBackend

FETCH = """
import urllib.error, urllib.request
for port in {ports}:
    try:
        with urllib.request.urlopen(f"http://127.0.0.2:{{port}}/", timeout=20) as answer:
            print(answer.read().decode())
    except urllib.error.HTTPError as error:
        print(error.code)
"""
"""127.0.0.2: what is on 127.0.0.1 is asked without a proxy."""


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.2", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def run(dockerd: DockerHost, hosts: tuple[str, ...], code: str) -> list[Outcome]:
    """Run code twice in one sandbox, and once in another that is open at the same time."""

    async def main() -> list[Outcome]:
        config = SandboxConfig(backend="docker", docker_url=dockerd.url, image=dockerd.image, hosts=hosts)
        async with (
            DockerBackend(config) as backend,
            await backend.open("a") as first_sandbox,
            await backend.open("b") as second_sandbox,
        ):
            return [
                await sandbox.run(Job("1", code=code)) for sandbox in (first_sandbox, first_sandbox, second_sandbox)
            ]

    return asyncio.run(main())


def test_listed_hosts_alone_are_reached(dockerd: DockerHost, port: int) -> None:
    for outcome in run(dockerd, (f"127.0.0.2:{port}",), FETCH.format(ports=[port, port + 1])):
        assert outcome.stdout.split() == ["hello", "403"], outcome


def test_without_a_list_there_is_no_way_out(dockerd: DockerHost, port: int) -> None:
    for outcome in run(dockerd, (), FETCH.format(ports=[port])):
        assert "Connection refused" in outcome.stderr or "unreachable" in outcome.stderr, outcome


def test_a_daemon_elsewhere_cannot_have_one() -> None:
    config = SandboxConfig(backend="docker", docker_url="tcp://127.0.0.1:1", hosts=("pypi.org:443",))
    with pytest.raises(ConfigError, match=r"sandbox\.hosts with the Docker daemon at tcp://127\.0\.0\.1:1"):
        asyncio.run(DockerBackend(config).start())
