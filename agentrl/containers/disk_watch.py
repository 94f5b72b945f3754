"""Sizes of machines' roots and volumes, where the storage driver has no quotas: a machine that is too large is ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from docker.errors import APIError

from agentrl.containers.daemon import DaemonClient
from agentrl.containers.docker_api import ContainerSummary, MeasuredVolume
from agentrl.containers.leases import MACHINE_LABEL
from agentrl.containers.machine import Machine
from agentrl.core.errors import SandboxFailure

_log = logging.getLogger(__name__)

PAUSE_S = 2.0
"""Time between two looks, at least."""
LOAD = 20
"""A look that took a time is followed by a pause of so many times that, since the daemon counts all files."""


class DiskWatch:
    """Looks at the machines that were added, from time to time."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self._machines: dict[str, Machine] = {}
        """By container."""
        self._watching: asyncio.Task[None] | None = None

    def add(self, machine: Machine) -> None:
        """Watch a machine."""
        self._machines[machine.container] = machine

    def remove(self, machine: Machine) -> None:
        """Watch a machine no more."""
        self._machines.pop(machine.container, None)

    def start(self) -> None:
        """Begin to look."""
        self._watching = asyncio.create_task(self._watch(), name="disk-watch")

    async def stop(self) -> None:
        """End."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._pause_s
        while True:
            await asyncio.sleep(pause_s)
            start = loop.time()
            for client in {machine.client for machine in self._machines.values()}:
                try:
                    await self.look(client)
                except (SandboxFailure, APIError) as error:
                    _log.warning("sizes of machines at %s are not known: %s", client.url, error)
            pause_s = max(self._pause_s, LOAD * (loop.time() - start))

    async def look(self, client: DaemonClient) -> None:
        """End the machines of a daemon that are larger than they may be."""
        containers = [machine.container for machine in self._machines.values() if machine.client is client]
        summaries = await client.call(lambda api: api.containers(size=True, filters={"id": containers}))
        volumes: Sequence[MeasuredVolume] = ()
        if any(_volume_names(summary) for summary in summaries):
            volumes = (await client.call(lambda api: api.df()))["Volumes"] or ()
        for summary in summaries:
            machine = self._machines.get(summary["Id"])
            names, machine_id = _volume_names(summary), summary["Labels"].get(MACHINE_LABEL)
            size = summary.get("SizeRw", 0) + sum(
                max(0, volume["UsageData"]["Size"])
                for volume in volumes
                if volume["Name"] in names or (volume["Labels"] or {}).get(MACHINE_LABEL) == machine_id
            )
            if machine is None or size <= machine.spec.disk_mb * 2**20:
                continue
            limit_mb = machine.spec.disk_mb
            _log.warning("machine %s wrote %d MiB, and may write %d: it is ended", machine.id, size >> 20, limit_mb)
            machine.ended_by = "disk"
            await machine.stop()


def _volume_names(summary: ContainerSummary) -> set[str]:
    return {mount["Name"] for mount in summary.get("Mounts", ()) if "Name" in mount}
