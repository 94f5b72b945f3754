"""Sessions of a tool server without the server, for tests of single tools."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentrl.sandbox.base import Sandbox
from agentrl.toolserver.hosted_tool import ToolSession


class LoneSession(ToolSession):
    """Opens a sandbox whenever the last one is no longer alive; ``opened`` are all of them."""

    def __init__(self, make: Callable[[int], Sandbox]) -> None:
        self.id = "lone"
        self.state: dict[str, Any] = {}
        self.opened: list[Sandbox] = []
        self._make = make

    async def sandbox(self) -> Sandbox:
        if not self.opened or not self.opened[-1].alive:
            self.opened.append(self._make(len(self.opened)))
        return self.opened[-1]

    @asynccontextmanager
    async def fresh_sandbox(self) -> AsyncIterator[Sandbox]:
        raise AssertionError("not asked for")
        yield


class NoSession(LoneSession):
    """For tools that never ask for a sandbox."""

    def __init__(self) -> None:
        super().__init__(self._refuse)

    def _refuse(self, number: int) -> Sandbox:
        raise AssertionError("this tool needs no sandbox")
