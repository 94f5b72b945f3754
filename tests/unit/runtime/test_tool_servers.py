"""A tool server of a run that dies: it is started again on its port, as often as it may be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.core.errors import ToolServerError
from agentrl.runtime.tool_servers import StartedServer


class FakeProcess:
    """A server at the port 8123 that dies when it is told to."""

    url = "http://127.0.0.1:8123"

    def __init__(self) -> None:
        self.dead = self.stopped = False

    def check(self) -> None:
        """Raise if it is dead."""
        if self.dead:
            raise ToolServerError("it ended (signal SIGKILL)")

    def stop(self) -> None:
        """Record the call."""
        self.stopped = True


async def until_started(server: StartedServer, processes: list[Any], count: int) -> None:
    while len(processes) < count or server.process is not processes[-1]:
        server.check()
        await asyncio.sleep(0)


def test_a_server_that_dies_is_started_again_on_its_port() -> None:
    processes: list[Any] = [FakeProcess()]
    ports: list[int] = []

    def launch(port: int) -> Any:
        ports.append(port)
        processes.append(FakeProcess())
        return processes[-1]

    async def run() -> None:
        server = StartedServer("search", processes[0], launch, max_restarts=2)
        server.check()
        for number in (1, 2):
            processes[-1].dead = True
            await until_started(server, processes, number + 1)
        processes[-1].dead = True
        with pytest.raises(ToolServerError, match=r"tools\.search\.max_restarts=2: it ended \(signal SIGKILL\)"):
            server.check()
        await server.aclose()

    asyncio.run(run())
    assert ports == [8123, 8123]
    assert all(process.stopped for process in processes), "what is left of a dead server is ended, too"


def test_a_server_that_does_not_start_again_ends_the_run() -> None:
    process: Any = FakeProcess()
    process.dead = True

    def launch(port: int) -> Any:
        raise ToolServerError("the index is gone")

    async def run() -> None:
        server = StartedServer("search", process, launch, max_restarts=3)
        with pytest.raises(ToolServerError, match="the index is gone"):
            await until_started(server, [process], 2)
        await server.aclose()

    asyncio.run(run())
