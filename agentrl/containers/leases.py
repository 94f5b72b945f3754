"""Leases: every container, network and image of a machine has an owner and a time to live.

What the daemon has made carries its first end of life in a label. Labels cannot be changed, so a process that holds machines
keeps an empty volume at the daemon, its lease, whose labels name the machines and a later end; it writes a new one every third of
the time to live. All is at the daemon: any process, on any machine that reaches it, sees what is past its time and removes it.
Times are those of the daemon's clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from docker.errors import APIError, NotFound

from agentrl.containers.daemon import DaemonClient
from agentrl.containers.docker_api import ContainerSummary, DaemonInfo, DockerApi
from agentrl.core.errors import SandboxFailure

_log = logging.getLogger(__name__)

MACHINE_LABEL, ROLE_LABEL, OWNER_LABEL, KEY_LABEL, EXPIRES_LABEL, MACHINES_LABEL, LEFT_LABEL = (
    f"agentrl.{name}" for name in ("machine", "role", "owner", "key", "expires", "machines", "left")
)
"""`LEFT_LABEL` is that of a lease whose process has ended and left its machines: it goes with the last of them."""
MACHINE_ROLE, SERVICE_ROLE = "machine", "service"
SERVICE_LABEL = "agentrl.service"
"""The name of a service, at its container."""
REFUSED_S = 2.0
"""Time until what the daemon did not remove is tried again."""
RENEWALS = 3
"""Renewals in a time to live."""


@dataclass(frozen=True, slots=True)
class LeaseLabels:
    """Labels of what belongs to a machine."""

    machine_id: str
    owner: str
    key: str
    expires: float
    """Seconds since 1970 of the daemon's clock."""

    def labels(self, role: str) -> dict[str, str]:
        """Return them for a container, network or image with this role."""
        return {
            MACHINE_LABEL: self.machine_id,
            ROLE_LABEL: role,
            OWNER_LABEL: self.owner,
            KEY_LABEL: self.key,
            EXPIRES_LABEL: f"{self.expires:.3f}",
        }


@dataclass(frozen=True, slots=True)
class LeasedMachine:
    """What a lease records about a machine."""

    key: str
    expires: float


class Lease:
    """Keeps the machines of one process alive at one daemon.

    Args:
        client: the daemon.
        owner: of the machines.
        lease_s: time to live, seconds.
    """

    def __init__(self, client: DaemonClient, owner: str, lease_s: float) -> None:
        self._client = client
        self._owner = owner
        self._lease_s = lease_s
        self._machines: dict[str, str] = {}
        """Keys by id."""
        self._volume: str | None = None
        self._writing = asyncio.Lock()
        self._clock_offset_s = 0.0
        self._heartbeat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the daemon's clock, and begin to renew."""
        info = await self._client.call(lambda api: api.info())
        self._clock_offset_s = daemon_time(info) - time.time()
        await self.write()
        self._heartbeat = asyncio.create_task(self._renew(), name="container-lease")

    @property
    def expires(self) -> float:
        """End of life of what is made or renewed now."""
        return time.time() + self._clock_offset_s + self._lease_s

    def add(self, machine_id: str, key: str) -> None:
        """Renew a machine from the next renewal on; until then its labels keep it alive."""
        self._machines[machine_id] = key

    async def hold(self, machine_id: str, key: str) -> None:
        """Renew a machine at once, under this key.

        Raises:
            SandboxFailure: the daemon is lost.
        """
        self.add(machine_id, key)
        await self.write()

    def release(self, machine_id: str) -> None:
        """Renew a machine no more."""
        self._machines.pop(machine_id, None)

    async def write(self, *, is_last: bool = False) -> None:
        """Write the lease: a new volume first, so that there always is one. The last one has `LEFT_LABEL`."""
        async with self._writing:
            name = f"agentrl-lease-{uuid.uuid4().hex[:12]}"
            labels = {
                ROLE_LABEL: "lease",
                OWNER_LABEL: self._owner,
                EXPIRES_LABEL: f"{self.expires:.3f}",
                MACHINES_LABEL: json.dumps(self._machines),
                **({LEFT_LABEL: ""} if is_last else {}),
            }
            await self._client.call(lambda api: api.create_volume(name, labels=labels))
            previous, self._volume = self._volume, name
            if previous is not None:
                await self._client.call(lambda api: _remove_volume(api, previous))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS)
            try:
                await self.write()
            except (SandboxFailure, APIError) as error:
                _log.warning("machines at %s are not renewed: %s", self._client.url, error)

    async def stop(self, *, keep: bool) -> None:
        """End the renewing; ``keep`` leaves the machines their time to live from now on."""
        if self._heartbeat is None:
            return
        self._heartbeat.cancel()
        await asyncio.gather(self._heartbeat, return_exceptions=True)
        try:
            if keep and self._machines:
                await self.write(is_last=True)
            elif self._volume is not None:
                volume = self._volume
                await self._client.call(lambda api: _remove_volume(api, volume))
        except (SandboxFailure, APIError) as error:
            _log.warning("the lease at %s is not removed before its time: %s", self._client.url, error)


def daemon_time(info: DaemonInfo) -> float:
    """Return the daemon's time, in seconds since 1970."""
    return datetime.fromisoformat(info["SystemTime"]).timestamp()


def read_leases(api: DockerApi) -> dict[str, LeasedMachine]:
    """Return what leases say of machines, by their ids; the latest end counts."""
    machines: dict[str, LeasedMachine] = {}
    for volume in api.volumes(filters={"label": f"{ROLE_LABEL}=lease"})["Volumes"] or ():
        labels = volume["Labels"]
        expires = float(labels[EXPIRES_LABEL])
        for machine_id, key in json.loads(labels[MACHINES_LABEL]).items():
            known_machine = machines.get(machine_id)
            if known_machine is None or known_machine.expires < expires:
                machines[machine_id] = LeasedMachine(key, expires)
    return machines


def machine_key(labels: Mapping[str, str], leases: Mapping[str, LeasedMachine]) -> str:
    """Return the key of a container's machine; empty for one of a warm pool."""
    lease = leases.get(labels[MACHINE_LABEL])
    return lease.key if lease is not None else labels[KEY_LABEL]


def end_of_life(labels: Mapping[str, str], leases: Mapping[str, LeasedMachine]) -> float:
    """Return when what has these labels is past its time."""
    lease = leases.get(labels[MACHINE_LABEL])
    expires = float(labels[EXPIRES_LABEL])
    return expires if lease is None else max(expires, lease.expires)


def leased_containers(api: DockerApi, *extra_labels: str) -> list[ContainerSummary]:
    """Return all containers with a lease, those that have ended too."""
    return api.containers(all=True, filters={"label": [MACHINE_LABEL, *extra_labels]})


def remove_machine(api: DockerApi, machine_id: str) -> None:
    """Remove a machine's containers, itself last so that it counts as long as there are others, its network and its volumes."""
    selected = f"{MACHINE_LABEL}={machine_id}"
    containers = leased_containers(api, selected)
    for container in sorted(containers, key=lambda container: container["Labels"][ROLE_LABEL] == MACHINE_ROLE):
        remove_container(api, container["Id"])
    for network in api.networks(filters={"label": selected}):
        _remove_network(api, network["Id"])
    for volume in api.volumes(filters={"label": selected})["Volumes"] or ():
        _remove_volume(api, volume["Name"])


def remove_container(api: DockerApi, container: str) -> None:
    """Remove a container with its processes and anonymous volumes; one that is gone is no error."""
    try:
        api.remove_container(container, force=True, v=True)
    except NotFound:
        pass
    except APIError as error:
        if error.status_code != 409:  # 409: it is being removed already
            raise


@dataclass(frozen=True, slots=True)
class Remains:
    """What `reap` has removed and left."""

    removed: tuple[str, ...]
    """Names or ids."""
    refused: tuple[str, ...]
    """What the daemon refused to remove, with its reason."""
    next_end: float | None
    """When the next object is past its time, by the daemon's clock; None: nothing is left."""


def reap(api: DockerApi) -> Remains:
    """Remove all that is past its time at a daemon."""
    removed, refused, ends = [], [], []
    containers, networks = leased_containers(api), api.networks(filters={"label": MACHINE_LABEL})
    images = api.images(filters={"label": MACHINE_LABEL})
    volumes = api.volumes(filters={"label": MACHINE_LABEL})["Volumes"] or ()
    # After the lists: a machine that is taken up now has its new lease already.
    leases, daemon_now = read_leases(api), daemon_time(api.info())
    objects = [
        *((remove_container, container["Id"], container["Labels"]) for container in containers),
        *((_remove_network, network["Id"], network["Labels"]) for network in networks),
        *((_remove_image, image["Id"], image["Labels"]) for image in images),
        *((_remove_volume, volume["Name"], volume["Labels"]) for volume in volumes),
    ]
    for remove, identifier, labels in objects:
        end = end_of_life(labels, leases)
        if end > daemon_now:
            ends.append(end)
            continue
        try:
            remove(api, identifier)
            removed.append(identifier.removeprefix("sha256:")[:12])
        except APIError as error:
            if error.status_code != 409:  # 409: a container still uses it
                refused.append(f"{identifier[:12]}: {error.explanation}")
            ends.append(daemon_now + REFUSED_S)
    machine_ids = {labels[MACHINE_LABEL] for _, _, labels in objects}
    for volume in api.volumes(filters={"label": f"{ROLE_LABEL}=lease"})["Volumes"] or ():
        end, leased_ids = float(volume["Labels"][EXPIRES_LABEL]), json.loads(volume["Labels"][MACHINES_LABEL])
        is_over = LEFT_LABEL in volume["Labels"] and machine_ids.isdisjoint(leased_ids)
        if end > daemon_now and not is_over:
            ends.append(end)
        else:
            _remove_volume(api, volume["Name"])
    return Remains(tuple(removed), tuple(refused), min(ends) if ends else None)


def _remove_network(api: DockerApi, network: str) -> None:
    try:
        api.remove_network(network)
    except NotFound:
        return


def _remove_image(api: DockerApi, image: str) -> None:
    try:
        api.remove_image(image, force=True)
    except NotFound:
        return


def _remove_volume(api: DockerApi, volume: str) -> None:
    try:
        api.remove_volume(volume)
    except NotFound:
        return
