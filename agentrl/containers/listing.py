"""What a daemon holds of machines, for ``agentrl containers ls`` and ``rm``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

from docker.errors import APIError

from agentrl.containers.daemon import DaemonClient
from agentrl.containers.docker_api import DockerApi
from agentrl.containers.leases import (
    MACHINE_LABEL,
    MACHINE_ROLE,
    OWNER_LABEL,
    ROLE_LABEL,
    daemon_time,
    end_of_life,
    leased_containers,
    machine_key,
    read_leases,
    remove_machine,
)
from agentrl.core.errors import ConfigError, SandboxFailure

SNAPSHOT = "snapshot"
"""Role and state of a snapshot."""


@dataclass(frozen=True, slots=True)
class LeasedObject:
    """A machine with its services, or a snapshot.

    Example: ``LeasedObject("unix:///var/run/docker.sock", "3f2a90c1b7de", "a-run", "task-7/2", "running", 2, 61.0, 540.0)``.
    """

    url: str
    """The daemon."""
    id: str
    """The machine's or the snapshot's id."""
    owner: str
    """The run."""
    key: str
    """What the owner calls it, such as the episode; empty for a machine of a warm pool."""
    state: str
    """Docker's word for the container's state; ``snapshot``."""
    services: int
    """Containers next to the machine."""
    age_s: float
    """Seconds since it was made."""
    left_s: float
    """Seconds of its time to live; negative: it is past its time."""


def list_objects(api: DockerApi, url: str) -> list[LeasedObject]:
    """Return machines and snapshots at a daemon, oldest first."""
    containers, images = leased_containers(api), api.images(filters={"label": f"{ROLE_LABEL}=snapshot"})
    leases, daemon_now = read_leases(api), daemon_time(api.info())
    services: dict[str, int] = {}
    for container in containers:
        labels = container["Labels"]
        if labels[ROLE_LABEL] != MACHINE_ROLE:
            services[labels[MACHINE_LABEL]] = services.get(labels[MACHINE_LABEL], 0) + 1
    described = [
        *((container["Labels"], container["State"], container["Created"]) for container in containers),
        *((image["Labels"], SNAPSHOT, image["Created"]) for image in images),
    ]
    rows = []
    for labels, state, created in described:
        if labels[ROLE_LABEL] not in (MACHINE_ROLE, SNAPSHOT):
            continue
        machine_id = labels[MACHINE_LABEL]
        key, end = machine_key(labels, leases), end_of_life(labels, leases)
        count = services.get(machine_id, 0)
        rows.append(
            LeasedObject(
                url, machine_id, labels[OWNER_LABEL], key, state, count, daemon_now - created, end - daemon_now
            )
        )
    return sorted(rows, key=lambda row: -row.age_s)


def select(rows: Sequence[LeasedObject], names: Sequence[str], *, is_all: bool) -> list[LeasedObject]:
    """Return the rows that are named by the beginning of their id, by their owner, or by ``OWNER/KEY``.

    Raises:
        ConfigError: a name names none.
    """
    if is_all:
        return list(rows)
    selected: dict[tuple[str, str], LeasedObject] = {}
    for name in names:
        matches = [row for row in rows if row.id.startswith(name) or name in (row.owner, f"{row.owner}/{row.key}")]
        if not matches:
            raise ConfigError(f"{name}: no machine has this id, run or RUN/KEY; agentrl containers ls lists them")
        selected |= {(row.url, row.id): row for row in matches}
    return list(selected.values())


async def remove_objects(
    client: DaemonClient, rows: Sequence[LeasedObject], progress: Callable[[LeasedObject], None]
) -> list[str]:
    """Remove machines, then snapshots; return why some could not be removed."""
    failures: list[str] = []

    async def remove(row: LeasedObject) -> None:
        try:
            if row.state == SNAPSHOT:
                for image in await client.call(methodcaller("images", filters={"label": f"{MACHINE_LABEL}={row.id}"})):
                    await client.call(methodcaller("remove_image", image["Id"], force=True))
            else:
                await client.call(partial(remove_machine, machine_id=row.id))
            progress(row)
        except (SandboxFailure, APIError) as error:
            failures.append(f"{row.id}: {error}")

    for is_snapshot in (False, True):
        await asyncio.gather(*(remove(row) for row in rows if (row.state == SNAPSHOT) == is_snapshot))
    return failures
