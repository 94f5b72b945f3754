"""Access to a machine that another process has opened: commands and files, while that process keeps it alive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from docker.errors import NotFound
from pydantic import ConfigDict, Field
from typing_extensions import override

from agentrl.config.base import Section
from agentrl.containers.daemon import DaemonClient
from agentrl.containers.machine import Lifecycle, Machine, MachineEndedError
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import MissingError, SandboxFailure


class MachineAccess(Section):
    """How another process on the daemon's machine finds a machine. Can be written as JSON."""

    model_config = ConfigDict(frozen=True)

    daemon: str
    """Address of its daemon."""
    container: str
    """Its container's id."""
    machine: str
    """Its id."""
    spec: MachineSpec
    """What it was made from, without variables and services."""
    user: str | None = None
    """User of the agent, as ``NAME`` or ``UID[:GID]``; None: that of the machine."""
    timeout_s: float | None = None
    """Seconds that the task gives the agent; None: no limit."""
    mcp_servers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """MCP servers of the task by name, for an agent program that connects to them: ``mcpServers`` of a file ``.mcp.json``."""

    @classmethod
    def from_machine(
        cls,
        machine: Machine,
        user: str | None,
        timeout_s: float | None,
        mcp_servers: Mapping[str, dict[str, Any]] | None = None,
    ) -> MachineAccess:
        """Return the access to a machine that is open here.

        Args:
            machine: of the task.
            user: see `user`.
            timeout_s: see `timeout_s`.
            mcp_servers: see `mcp_servers`.
        """
        return cls(
            daemon=machine.client.url,
            container=machine.container,
            machine=machine.id,
            spec=machine.spec.model_copy(update={"env": {}, "services": ()}),
            user=user,
            timeout_s=timeout_s,
            mcp_servers=dict(mcp_servers or {}),
        )

    @asynccontextmanager
    async def connect(self, state: Path) -> AsyncIterator[Machine]:
        """Yield the machine; at the end of the context the connection is closed, and the machine stays.

        Args:
            state: folder for results of commands.

        Raises:
            SandboxFailure: the daemon does not answer.
        """
        client = DaemonClient(self.daemon)
        try:
            try:
                await client.connect()
            except MissingError as error:
                raise SandboxFailure(str(error)) from error
            yield Machine(client, self.container, self.machine, self.spec, state, _OpenElsewhere())
        finally:
            await client.close()


async def inspect_machine(machine: Machine) -> tuple[int, str]:
    """Return the process id of a machine's first process on the daemon's machine, 0 if it has ended, and the id of its image.

    Raises:
        MachineEndedError: the machine is gone.
        SandboxFailure: the daemon does not answer.
    """
    try:
        container = await machine.client.call(lambda api: api.inspect_container(machine.container))
    except NotFound as error:
        raise MachineEndedError(f"machine {machine.id} was removed", "removed") from error
    return container["State"]["Pid"], container["Image"]


class _OpenElsewhere(Lifecycle):
    """The process that has opened the machine prepares and removes it."""

    @override
    async def on_start(self, machine: Machine) -> None:
        return

    @override
    async def on_close(self, machine: Machine) -> None:
        raise AssertionError("the process that has opened a machine closes it")

    @override
    async def on_snapshot(self, machine: Machine) -> dict[str, str]:
        raise AssertionError("the process that has opened a machine makes its snapshots")
