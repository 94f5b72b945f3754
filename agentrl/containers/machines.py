"""Opens machines at the Docker daemons of the section ``containers``."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from pathlib import Path
from typing import Self

from docker.errors import APIError, ImageNotFound

from agentrl.config.containers import ContainersConfig
from agentrl.containers.daemon import DaemonClient, daemon_urls, message
from agentrl.containers.docker_api import ContainerSummary
from agentrl.containers.machine import Machine
from agentrl.containers.options import machine_options
from agentrl.containers.spec import MachineSpec
from agentrl.core.errors import MissingError, SandboxFailure

_log = logging.getLogger(__name__)

MACHINE_LABEL, OWNER_LABEL, KEY_LABEL, SPEC_LABEL = (f"agentrl.{name}" for name in ("machine", "owner", "key", "spec"))


class Machines:
    """The machines of one owner.

    Args:
        config: the section ``containers``.
        owner: names the run; machines that it has left are opened again by their keys.
    """

    def __init__(self, config: ContainersConfig, owner: str) -> None:
        self.config = config
        self.owner = owner
        self._clients = [DaemonClient(url) for url in daemon_urls(config)]
        self._open: dict[str, Machine] = {}
        self._state = state_folder(config)

    async def start(self) -> None:
        """Connect to the daemons.

        Raises:
            MissingError: none answers.
        """
        await asyncio.gather(*(client.connect() for client in self._clients))

    async def open(self, spec: MachineSpec, key: str) -> Machine:
        """Return a machine that is ready for commands: the one that the owner has under this key already, or a new one.

        Args:
            spec: what a new one is made from.
            key: names the machine for its owner, such as the id of an episode.

        Raises:
            MissingError: the daemon has no such image.
            SandboxFailure: it could not be made.
        """
        client = self._clients[0]
        container = await self._adopt(client, key)
        if container is not None:
            machine_id = container["Labels"][MACHINE_LABEL]
            machine = Machine(client, container["Id"], machine_id, spec, self._state, self._remove)
        else:
            machine = await self._make(client, spec, key)
        self._open[machine.id] = machine
        return machine

    async def _adopt(self, client: DaemonClient, key: str) -> ContainerSummary | None:
        filters = {"label": [f"{OWNER_LABEL}={self.owner}", f"{KEY_LABEL}={key}"], "status": "running"}
        containers = await client.call(lambda api: api.containers(filters=filters))
        return containers[0] if containers else None

    async def _make(self, client: DaemonClient, spec: MachineSpec, key: str) -> Machine:
        machine_id = uuid.uuid4().hex[:12]
        labels = {
            MACHINE_LABEL: machine_id,
            OWNER_LABEL: self.owner,
            KEY_LABEL: key,
            SPEC_LABEL: spec.digest,
        }
        options = machine_options(spec, labels)
        name = f"agentrl-{machine_id}"
        try:
            container = await client.call(lambda api: api.create_container(name=name, **options))
            await client.call(lambda api: api.start(container["Id"]))
        except ImageNotFound as error:
            raise MissingError(f"the Docker daemon at {client.url} has no image {spec.image}") from error
        except BaseException as error:
            await asyncio.shield(client.remove_container(name))
            if isinstance(error, APIError):
                raise SandboxFailure(f"no machine could be started at {client.url}: {message(error)}") from error
            raise
        machine = Machine(client, container["Id"], machine_id, spec, self._state, self._remove)
        try:
            await machine.check()
        except BaseException:
            await asyncio.shield(machine.close())
            raise
        return machine

    async def _remove(self, machine: Machine) -> None:
        await machine.client.remove_container(machine.container)
        self._open.pop(machine.id, None)

    async def close(self) -> None:
        """Close all machines that are open, and the connections."""
        await asyncio.gather(*(machine.close() for machine in list(self._open.values())))
        for client in self._clients:
            await client.close()

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close."""
        await self.close()


def state_folder(config: ContainersConfig) -> Path:
    """Return the folder for results of commands."""
    if config.state is not None:
        return config.state
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "agentrl" / "containers"
