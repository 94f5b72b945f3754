"""One Docker daemon on which machines run: its places for them, what it can do, and how containers are made there.

The name of a machine's container has a number below the bound of machines. The daemon gives a name to one container only, so the
bound holds for all processes that use it, on whatever machine they are. A machine that grades another one shares its place,
by its name and `BESIDE`: it never waits for a place that others hold until they are graded.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

from docker.errors import APIError, NotFound

from agentrl.config.containers import ContainersConfig
from agentrl.containers.daemon import DaemonClient, is_podman, message
from agentrl.containers.docker_api import ContainerSummary, CreatedObject, DockerApi, Options
from agentrl.containers.images import Images
from agentrl.containers.leases import (
    MACHINE_LABEL,
    MACHINE_ROLE,
    OWNER_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    Lease,
    LeasedMachine,
    LeaseLabels,
    leased_containers,
    machine_key,
    read_leases,
)
from agentrl.containers.options import (
    Dialect,
    docker_dialect,
    machine_options,
    podman_dialect,
    service_options,
    shared_hosts,
    volume_name,
)
from agentrl.containers.reaper import ensure_reaper, wake_reaper
from agentrl.containers.spec import MachineSpec, ServiceSpec, services_in_order
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure

_log = logging.getLogger(__name__)

NAME = "agentrl-machine-{}"
BESIDE = "-tests"
_NAME = re.compile(r"/agentrl-machine-(\d+)")
_NAME_TAKEN = "name is already in use"
"""Error text of Podman, whose status is that of any failure."""
PUBLIC_NETWORK = "agentrl-public"
HEALTH_POLL_S = 0.2
LIMITS = {"MemoryLimit": "memory", "PidsLimit": "processes", "CpuCfsQuota": "CPU time"}
"""What the daemon must be able to limit, by the keys of its description."""


@dataclass(frozen=True, slots=True)
class HostScan:
    """Machines of a daemon at one moment."""

    machines: tuple[ContainerSummary, ...]
    """Containers of machines of all owners; without those of services."""
    leases: Mapping[str, LeasedMachine]
    """What leases say of them, by machine id."""
    free_numbers: tuple[int, ...]
    """Places for further machines."""

    def find(self, owner: str, key: str) -> ContainerSummary | None:
        """Return the container of an owner's machine with this key."""
        for container in self.machines:
            labels = container["Labels"]
            if labels[OWNER_LABEL] == owner and machine_key(labels, self.leases) == key:
                return container
        return None


class Host:
    """A daemon.

    Args:
        config: the section ``containers``.
        url: the daemon's address.
        owner: of the machines that this process opens.
        state: folder that the processes of this machine share.
    """

    def __init__(self, config: ContainersConfig, url: str, owner: str, state: Path) -> None:
        self.client = DaemonClient(url)
        self.images = Images(self.client, config, state)
        self.lease = Lease(self.client, owner, config.lease_s)
        self.has_quota: bool | None = None
        """Whether the storage driver limits the size of a machine's root; None: not known before the first machine."""
        self._config = config
        self._state = state
        self._dialect: Dialect
        self._starting, self._has_started = asyncio.Lock(), False

    async def start(self) -> None:
        """Connect, write a lease, and see to it that a reaper runs; again for a daemon that was lost.

        Raises:
            NoDaemonError: no daemon answers.
            MissingError: it cannot limit what machines use, or lacks ``containers.runtime``.
            HostLostError: it is lost again.
        """
        async with self._starting:
            if self._has_started:
                await self.lease.write()
            else:
                await self._connect()
            await asyncio.to_thread(ensure_reaper, self.client.url, self._state)
            self._has_started = True

    async def _connect(self) -> None:
        await self.client.connect()
        info = self.client.info
        # Rootless Podman says that it limits everything, and then ignores limits without cgroups of version 2.
        ignores = info.get("CgroupVersion") == "1" and info.get("Rootless", False)
        unlimited = [name for key, name in LIMITS.items() if ignores or not info.get(key)]
        if unlimited:
            raise MissingError(
                f"the Docker daemon at {self.client.url} cannot limit {', '.join(unlimited)}: it needs cgroups (a rootless one: "
                "of version 2, delegated to its user)"
            )
        if self._config.runtime is not None:
            self._check_runtime(self._config.runtime)
        version = await self.client.call(lambda api: api.version(api_version=False))
        self._dialect = await asyncio.to_thread(podman_dialect, self._state) if is_podman(version) else docker_dialect()
        await self.lease.start()

    async def scan(self) -> HostScan:
        """Return the daemon's machines."""

        def read(api: DockerApi) -> HostScan:
            containers = leased_containers(api, f"{ROLE_LABEL}={MACHINE_ROLE}")
            matches = [_NAME.fullmatch(name) for container in containers for name in container["Names"]]
            used = {int(match[1]) for match in matches if match is not None}
            free_numbers = tuple(number for number in range(self._config.machines) if number not in used)
            return HostScan(tuple(containers), read_leases(api), free_numbers)

        return await self.client.call(read)

    async def name_beside(self, container: str) -> str:
        """Return the name of the container that shares the place of a machine's container.

        Raises:
            NotFound: the container is gone.
        """
        details = await self.client.call(lambda api: api.inspect_container(container))
        return f"{details['Name'].removeprefix('/')}{BESIDE}"

    async def create(self, name: str, spec: MachineSpec, image: str, identity: LeaseLabels) -> str | None:
        """Make a machine's container with its services, all started; return its id, or None if the name is taken.

        Raises:
            SandboxFailure: the daemon refuses.
            MissingError: it lacks what the machine needs.
        """
        self._check_network(spec)
        service_images = {
            service.name: await self.images.ensure(service.image, service.build) for service in spec.services
        }
        network = await self._network(spec, identity)
        for volume in spec.volume_names:
            await self.client.call(
                methodcaller(
                    "create_volume", volume_name(identity.machine_id, volume), labels=identity.labels("volume")
                )
            )
        container = await self._create_machine(name, spec, image, identity, network)
        if container is None:
            return None
        shares_namespace = "extra_hosts" in network
        if shares_namespace:
            await self.client.call(lambda api: api.start(container))
        mode = f"container:{container}" if shares_namespace else str(network["network_mode"])
        for service in services_in_order(spec.services):
            await self._start_service(service, spec, service_images[service.name], identity, mode)
        if not shares_namespace:
            if spec.services and spec.network == "public":
                await self.client.call(lambda api: api.connect_container_to_network(container, PUBLIC_NETWORK))
            await self.client.call(lambda api: api.start(container))
        return container

    async def _create_machine(
        self, name: str, spec: MachineSpec, image: str, identity: LeaseLabels, network: Options
    ) -> str | None:
        labels = identity.labels(MACHINE_ROLE)
        while True:
            with_quota = self.has_quota is not False
            options = machine_options(spec, image, labels, network, dialect=self._dialect, has_quota=with_quota)
            create = methodcaller("create_container", name=name, **options)
            try:
                created: CreatedObject = await self.client.call(create)
            except APIError as error:
                if error.status_code == 409 or _NAME_TAKEN in message(error):
                    return None
                if with_quota and "storage-opt" in message(error):
                    if self.has_quota is False:  # another machine has just seen it
                        continue
                    self.has_quota = False
                    _log.warning(
                        "the storage driver of the Docker daemon at %s has no quotas (overlay2 on xfs with pquota has): sizes of "
                        "machines are checked every few seconds",
                        self.client.url,
                    )
                    continue
                raise
            if with_quota:
                self.has_quota = True
            return created["Id"]

    def _check_network(self, spec: MachineSpec) -> None:
        if spec.network == "public" and not self.client.info["IPv4Forwarding"]:
            raise MissingError(
                f"network=public: the Docker daemon at {self.client.url} forwards no packets, so machines would reach nothing: "
                "start it without --ip-forward=false, or set the network to no-network or allowlist"
            )
        if spec.network == "allowlist" and spec.runtime is not None:
            raise ConfigError(
                f"network=allowlist with containers.runtime={spec.runtime}: a machine with its own kernel has its own loopback, "
                "on which the proxy cannot listen; leave out the runtime, or set the network to no-network or public"
            )

    async def _network(self, spec: MachineSpec, identity: LeaseLabels) -> Options:
        """Return options of a machine's network, after making the networks that it needs."""
        if spec.network == "public":
            await self.client.call(_ensure_public_network)
        if not spec.services:
            return {"network_mode": PUBLIC_NETWORK if spec.network == "public" else "none"}
        name = f"agentrl-{identity.machine_id}"
        labels = identity.labels("network")
        try:
            await self.client.call(
                lambda api: api.create_network(
                    name, driver="bridge", internal=True, check_duplicate=True, labels=labels
                )
            )
        except APIError as error:
            _log.info("services share their machine's network namespace: %s", message(error))
            alone = PUBLIC_NETWORK if spec.network == "public" else "none"
            return {"network_mode": alone, "extra_hosts": shared_hosts(spec.services)}
        return {"network_mode": name}

    async def _start_service(
        self, service: ServiceSpec, spec: MachineSpec, image: str, identity: LeaseLabels, network_mode: str
    ) -> None:
        labels = {**identity.labels("service"), SERVICE_LABEL: service.name}
        mode: Options = {"network_mode": network_mode}
        options = service_options(service, spec, image, labels, mode, dialect=self._dialect)
        name = f"agentrl-{identity.machine_id}-{service.name}"
        if not network_mode.startswith("container:"):
            alias = {"EndpointsConfig": {network_mode: {"Aliases": [service.name]}}}
            options = {**options, "networking_config": alias}
        try:
            created = await self.client.call(lambda api: api.create_container(name=name, **options))
            if not network_mode.startswith("container:") and spec.network == "public":
                await self.client.call(lambda api: api.connect_container_to_network(created["Id"], PUBLIC_NETWORK))
            await self.client.call(lambda api: api.start(created["Id"]))
        except APIError as error:
            raise SandboxFailure(f"service {service.name} cannot be started: {message(error)}") from error
        await self._await_service(service, created["Id"])

    async def _await_service(self, service: ServiceSpec, container: str) -> None:
        while True:
            state = (await self.client.call(lambda api: api.inspect_container(container)))["State"]
            if not state["Running"]:
                raise SandboxFailure(
                    f"service {service.name} has ended with {state['ExitCode']} {state['Error']}".rstrip()
                )
            if service.healthcheck is None:
                return
            status = state["Health"]["Status"]
            if status == "healthy":
                return
            if status == "unhealthy":
                raise SandboxFailure(f"service {service.name} is not healthy: {service.healthcheck.command!r} fails")
            await asyncio.sleep(HEALTH_POLL_S)

    async def services_run(self, spec: MachineSpec, machine_id: str) -> bool:
        """Return whether all services of a machine run."""
        selected = (f"{MACHINE_LABEL}={machine_id}", SERVICE_LABEL)
        containers = await self.client.call(lambda api: leased_containers(api, *selected))
        running = {container["Labels"][SERVICE_LABEL] for container in containers if container["State"] == "running"}
        return {service.name for service in spec.services} <= running

    async def first_process(self, container: str) -> int:
        """Return the process id of a container's first process on the daemon's machine; 0 if it has ended."""
        try:
            return (await self.client.call(lambda api: api.inspect_container(container)))["State"]["Pid"]
        except NotFound:
            return 0

    def check_kernel(self, runtime: str, release: str) -> None:
        """Check that a runtime has its own kernel.

        Args:
            runtime: its name.
            release: of the kernel inside.

        Raises:
            ConfigError: it is that of the daemon's machine.
        """
        if release == self.client.info["KernelVersion"]:
            raise ConfigError(
                f"containers.runtime={runtime} runs machines on the kernel of the daemon's machine ({release}); set one with its "
                "own kernel, such as runsc (gVisor), or leave the key out"
            )

    def _check_runtime(self, runtime: str) -> None:
        runtimes = self.client.info["Runtimes"]
        # A name with a dot is that of a shim, which the daemon finds by itself.
        if "." not in runtime and runtime not in runtimes:
            names = ", ".join(sorted(runtimes))
            raise MissingError(
                f"containers.runtime={runtime}, but the Docker daemon at {self.client.url} has only {names}: install it and "
                "register it with the daemon (gVisor: `runsc install`)"
            )

    async def close(self, *, keep: bool) -> None:
        """End the lease, or leave it its time, and close the connection."""
        await self.images.close()
        await self.lease.stop(keep=keep)
        await self.client.close()
        await asyncio.to_thread(wake_reaper, self.client.url, self._state)


def _ensure_public_network(api: DockerApi) -> None:
    """Make the network of machines that reach everything but each other, if there is none."""
    if any(network["Name"] == PUBLIC_NETWORK for network in api.networks(names=[PUBLIC_NETWORK])):
        return
    try:
        api.create_network(
            PUBLIC_NETWORK,
            driver="bridge",
            check_duplicate=True,
            options={"com.docker.network.bridge.enable_icc": "false"},
            labels={ROLE_LABEL: "public"},
        )
    except APIError as error:
        if error.status_code != 409:  # 409: another process has just made it
            raise
