import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = Path(os.environ.get("AGENTRL_ENVIRONMENTS", ROOT / ".venv-environments"))
"""Environments of libraries: a folder each with ``bin``; `make test-environments` builds them."""


def python_of(name: str) -> Path:
    """The Python of an environment; skips the test if it is missing."""
    python = ENVIRONMENTS / name / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"{python} is missing: make test-environments builds it")
    return python


class ServerProcess:
    """A server of another library in a process; ``url`` is its address."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        assert port.isdecimal(), f"{command} printed no port: {port!r}"
        self.url = f"http://127.0.0.1:{port}"

    def kill(self) -> None:
        """Kill it, if it lives, and wait for its end."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Serve = Callable[..., ServerProcess]


def start(stack: ExitStack, environment: str, script: str, *arguments: object) -> ServerProcess:
    """Start a script of this folder with the Python of an environment, until the stack closes."""
    command = [str(python_of(environment)), str(Path(__file__).with_name(script)), *map(str, arguments)]
    server = ServerProcess(command)
    stack.callback(server.kill)
    return server


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers of a test: the environment, a script of this folder, its arguments."""
    with ExitStack() as stack:
        yield partial(start, stack)


@pytest.fixture(scope="session")
def shared() -> Iterator[Serve]:
    """As `serve`, for servers that tests share: equal arguments give the same one."""
    with ExitStack() as stack:
        yield cache(partial(start, stack))
