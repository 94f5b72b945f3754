"""Opens machines at the Docker daemons of the section ``containers``."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
import uuid
from collections import defaultdict
from operator import methodcaller
from pathlib import Path
from typing import Self

from docker.errors import APIError, NotFound

from agentrl.config.containers import ContainersConfig
from agentrl.containers.allowlist import AllowlistProxy, listen_inside
from agentrl.containers.daemon import DaemonClient, HostLostError, NoDaemonError, daemon_urls, message
from agentrl.containers.disk_watch import DiskWatch
from agentrl.containers.host import NAME, Host, HostScan
from agentrl.containers.leases import MACHINE_LABEL, LeaseLabels, remove_container, remove_machine
from agentrl.containers.machine import Command, Machine, MachineEndedError
from agentrl.containers.spec import MachineSpec
from agentrl.containers.warm_pool import WarmPool
from agentrl.core.errors import MissingError, SandboxFailure

_log = logging.getLogger(__name__)

POLL_S = 0.5
"""Time between two looks at daemons that are full: other processes may have closed machines."""
LOST_S = 30.0
"""Time between two looks at a daemon that did not answer."""
WAIT_LOG_S = 30.0
"""Time between two messages that say that a machine is waited for."""
OLD_STATE_S = 14 * 86400.0
"""Age of results of commands whose machine was never closed, after which they are removed."""


class Machines:
    """The machines of one owner.

    Args:
        config: the section ``containers``.
        owner: names the run; machines that it has left are opened again by their keys.
    """

    def __init__(self, config: ContainersConfig, owner: str) -> None:
        self.config = config
        self.owner = owner
        self._state = state_folder(config)
        self.hosts = [Host(config, url, owner, self._state) for url in daemon_urls(config)]
        self._open: dict[str, Machine] = {}
        """By id."""
        self._hosts_by_client: dict[DaemonClient, Host] = {host.client: host for host in self.hosts}
        self._keys: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._proxies: dict[str, tuple[int, AllowlistProxy]] = {}
        """By machine id, with the process whose network namespace each listens in."""
        self._returns: dict[Host, asyncio.Task[None]] = {}
        """Daemons that do not answer, with what waits until they do."""
        self._snapshots: list[tuple[Host, str, str]] = []
        """Host, id in the lease, and image label of each."""
        self._freed = asyncio.Event()
        self._has_ended = False
        self._waiting = 0
        """Callers that wait for a new machine."""
        self.warm_pool = WarmPool(config.warm, self._make_warm)
        self.disk_watch = DiskWatch()

    async def start(self) -> None:
        """Connect to the daemons, and start what looks after machines.

        Raises:
            MissingError: none answers, or one lacks what limits need, or ``containers.runtime``.
        """
        await asyncio.to_thread(_remove_old_results, self._state)
        outcomes = await asyncio.gather(*(host.start() for host in self.hosts), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for host, outcome in zip(self.hosts, outcomes, strict=True):
            if isinstance(outcome, NoDaemonError) and len(failures) < len(self.hosts):
                self._on_lost(host, outcome)
            elif isinstance(outcome, BaseException):
                await self.leave()
                raise outcome
        self.disk_watch.start()

    async def open(self, spec: MachineSpec, key: str, *, beside: Machine | None = None) -> Machine:
        """Return a machine that is ready for commands: the one that the owner has under this key already, or a new one.

        `Machine.is_adopted` tells which. A machine of this key that has ended is removed, and a new one is made.

        Args:
            spec: what a new one is made from.
            key: names the machine for its owner, such as the id of an episode; not empty.
            beside: an open machine whose place a new one shares, at the same daemon, without being counted: it grades that one.

        Raises:
            ConfigError: the spec does not fit the daemon.
            MissingError: the image cannot be had, or the daemon lacks what the machine needs.
            SandboxFailure: it could not be made, or all daemons stay full.
        """
        if self.config.runtime is not None and spec.runtime is None:
            spec = spec.model_copy(update={"runtime": self.config.runtime})
        async with self._keys[key]:
            machine = await self._adopt(spec, key) or await self._take_warm(spec, key)
            if machine is None and beside is not None:
                machine = await self._make_beside(spec, key, beside)
            elif machine is None:
                self._waiting += 1
                try:
                    machine = await self._make(spec, key)
                finally:
                    self._waiting -= 1
        if not self._waiting:
            self.warm_pool.refill(spec)
        return machine

    # ---- Machines that are there already -------------------------------------------------------------------------

    async def _adopt(self, spec: MachineSpec, key: str) -> Machine | None:
        for host, scan in await self._scan():
            container = scan.find(self.owner, key)
            if container is None:
                continue
            machine_id = container["Labels"][MACHINE_LABEL]
            if machine_id in self._open:
                return self._open[machine_id]
            # First the lease, then the look: a reaper that was faster shows in the look.
            await host.lease.hold(machine_id, key)
            machine = self._machine(host, container["Id"], machine_id, spec)
            machine.is_adopted = True
            try:
                await machine.check()
                if not await host.services_run(spec, machine_id):
                    raise MachineEndedError(f"services of machine {machine_id} have ended", "exited")
                await self._prepare(machine)
            except SandboxFailure as error:
                _log.warning("the machine of %s is made again: %s", key, error)
                await machine.close()
                return None
            return machine
        return None

    async def _take_warm(self, spec: MachineSpec, key: str) -> Machine | None:
        while (machine := self.warm_pool.take(spec)) is not None:
            try:
                await self._host(machine).lease.hold(machine.id, key)
                await machine.check()
                return machine
            except SandboxFailure as error:
                _log.warning("a warm machine is not used: %s", error)
                await machine.close()
        return None

    # ---- New machines --------------------------------------------------------------------------------------------

    async def _make(self, spec: MachineSpec, key: str) -> Machine:
        """Return a new machine, on the daemon with the fewest that has a free place."""
        loop = asyncio.get_running_loop()
        start, logged = loop.time(), loop.time()
        while True:
            self._freed.clear()
            for host, scan in sorted(await self._scan(), key=lambda pair: len(pair[1].machines)):
                if (machine := await self._try_make(host, scan, spec, key)) is not None:
                    return machine
            if await self.warm_pool.evict():
                continue
            if loop.time() - start > self.config.wait_s:
                text = f"no machine is free after {self.config.wait_s:g} s: {self._bound_text()}"
                raise SandboxFailure(f"{text} (containers.machines, containers.wait_s)")
            if loop.time() - logged > WAIT_LOG_S:
                logged = loop.time()
                _log.info("waiting for a free machine since %.0f s: %s", loop.time() - start, self._bound_text())
            try:
                async with asyncio.timeout(POLL_S):
                    await self._freed.wait()
            except TimeoutError:
                continue

    async def _make_beside(self, spec: MachineSpec, key: str, other: Machine) -> Machine:
        """Return a new machine that shares the place of another one."""
        host = self._host(other)
        image = await host.images.ensure(spec.image, spec.build)
        try:
            name = await host.name_beside(other.container)
        except NotFound as error:
            raise MachineEndedError(f"machine {other.id} was removed", "removed") from error
        try:
            async with asyncio.timeout(self.config.start_s):
                while (machine := await self._make_at(host, name, spec, image, key)) is None:
                    # The place is this owner's: what has the name is left of a machine that had the place before.
                    await host.client.call(lambda api: remove_container(api, name))
        except TimeoutError as error:
            raise SandboxFailure(f"{host.client.url} does not remove {name} (containers.start_s)") from error
        return machine

    def _bound_text(self) -> str:
        return f"{self.config.machines} are in use at each of {', '.join(host.client.url for host in self.hosts)}"

    async def _make_warm(self, spec: MachineSpec) -> Machine | None:
        for host, scan in sorted(await self._scan(), key=lambda pair: len(pair[1].machines)):
            if (machine := await self._try_make(host, scan, spec, "")) is not None:
                return machine
        return None

    async def _try_make(self, host: Host, scan: HostScan, spec: MachineSpec, key: str) -> Machine | None:
        """Return a new machine on a daemon; None if it is full, has lost the connection, or has no such snapshot."""
        try:
            if not scan.free_numbers:
                return None
            if spec.image is not None and spec.image.startswith("sha256:") and len(self.hosts) > 1:
                image = await host.images.find(spec.image)
                if image is None:
                    return None
            else:
                image = await host.images.ensure(spec.image, spec.build)
            for number in scan.free_numbers:
                machine = await self._make_at(host, NAME.format(number), spec, image, key)
                if machine is not None:
                    return machine
            return None
        except HostLostError as error:
            self._on_lost(host, error)
            return None

    async def _make_at(self, host: Host, name: str, spec: MachineSpec, image: str, key: str) -> Machine | None:
        identity = LeaseLabels(uuid.uuid4().hex[:12], self.owner, key, host.lease.expires)
        host.lease.add(identity.machine_id, key)  # its start may take longer than a lease
        machine: Machine | None = None
        try:
            async with asyncio.timeout(self.config.start_s):
                container = await host.create(name, spec, image, identity)
            if container is not None:
                machine = self._machine(host, container, identity.machine_id, spec)
                await self._prepare(machine)
                await machine.check()
        except BaseException as error:
            await asyncio.shield(self._discard(host, identity.machine_id, machine))
            if isinstance(error, TimeoutError):
                raise SandboxFailure(
                    f"a machine does not start within {self.config.start_s:g} s at {host.client.url} (containers.start_s)"
                ) from error
            if isinstance(error, APIError):
                raise SandboxFailure(_start_text(host, spec, error)) from error
            raise
        if container is None:
            host.lease.release(identity.machine_id)
            if spec.services or spec.volumes:
                await self._discard(host, identity.machine_id, None)
        return machine

    async def _discard(self, host: Host, machine_id: str, machine: Machine | None) -> None:
        if machine is not None:
            await machine.close()
            return
        host.lease.release(machine_id)
        try:
            await host.client.call(lambda api: remove_machine(api, machine_id))
        except (SandboxFailure, APIError) as error:
            _log.warning("what was made of a machine is left to its lease: %s", message(error))

    def _machine(self, host: Host, container: str, machine_id: str, spec: MachineSpec) -> Machine:
        machine = Machine(host.client, container, machine_id, spec, self._state, self)
        self._open[machine_id] = machine
        if not host.has_quota or spec.volume_names:
            self.disk_watch.add(machine)
        return machine

    async def _prepare(self, machine: Machine) -> None:
        """Bring a machine that runs to where commands can be run; a second time changes nothing."""
        await self.on_start(machine)
        if machine.spec.runtime is not None:
            release = await machine.run(Command("read -r _ _ release _ < /proc/version; echo $release"))
            self._host(machine).check_kernel(machine.spec.runtime, release.output.strip())
        if machine.spec.healthcheck is not None:
            await machine.wait_healthy(machine.spec.healthcheck)

    # ---- What machines call back ---------------------------------------------------------------------------------

    async def on_start(self, machine: Machine) -> None:
        """Listen for a machine's requests to its allowed hosts; see `Lifecycle`."""
        if machine.spec.network != "allowlist":
            return
        process = await self._host(machine).first_process(machine.container)
        listening = self._proxies.get(machine.id)
        if listening is not None:
            if listening[0] == process:
                return
            await listening[1].close()
        listener = await asyncio.to_thread(listen_inside, process, machine.container)
        proxy = AllowlistProxy(machine.spec.allowed_hosts)
        await proxy.start(listener)
        self._proxies[machine.id] = (process, proxy)

    async def on_close(self, machine: Machine) -> None:
        """Remove a machine with its services and network; see `Lifecycle`."""
        host = self._host(machine)
        self.disk_watch.remove(machine)
        await self._close_proxy(machine)
        try:
            await host.client.call(lambda api: remove_machine(api, machine.id))
        except (SandboxFailure, APIError) as error:
            _log.warning("machine %s is left to its lease: %s", machine.id, message(error))
        host.lease.release(machine.id)
        self._open.pop(machine.id, None)
        self._freed.set()

    async def on_snapshot(self, machine: Machine) -> dict[str, str]:
        """Return the labels of an image of a machine; see `Lifecycle`."""
        host = self._host(machine)
        identity = LeaseLabels(uuid.uuid4().hex[:12], self.owner, "snapshot", host.lease.expires)
        host.lease.add(identity.machine_id, "snapshot")
        self._snapshots.append((host, identity.machine_id, f"{MACHINE_LABEL}={identity.machine_id}"))
        return identity.labels("snapshot")

    async def _close_proxy(self, machine: Machine) -> None:
        if (listening := self._proxies.pop(machine.id, None)) is not None:
            await listening[1].close()

    # ---- Daemons -------------------------------------------------------------------------------------------------

    def _host(self, machine: Machine) -> Host:
        return self._hosts_by_client[machine.client]

    async def _scan(self) -> list[tuple[Host, HostScan]]:
        """Return the machines of all daemons that answer; those that were lost are tried if there is no other.

        Raises:
            HostLostError: none answers.
        """
        hosts = [host for host in self.hosts if host not in self._returns] or self.hosts
        scans = await asyncio.gather(*(self._scan_host(host) for host in hosts), return_exceptions=True)
        answers: list[tuple[Host, HostScan]] = []
        for host, scan in zip(hosts, scans, strict=True):
            if isinstance(scan, HostScan):
                answers.append((host, scan))
            elif isinstance(scan, HostLostError | NoDaemonError):
                self._on_lost(host, scan)
            else:
                raise scan
        if not answers:
            raise HostLostError(
                f"no Docker daemon of containers.hosts answers: {', '.join(host.client.url for host in self.hosts)}"
            )
        return answers

    async def _scan_host(self, host: Host) -> HostScan:
        if host in self._returns:
            await host.start()
        scan = await host.scan()
        self._on_answer(host)
        return scan

    def _on_lost(self, host: Host, error: HostLostError | NoDaemonError) -> None:
        if host not in self._returns and not self._has_ended:
            _log.warning("%s; it is not used until it answers again", error)
            self._returns[host] = asyncio.create_task(self._wait_for_return(host), name="lost-daemon")

    async def _wait_for_return(self, host: Host) -> None:
        while True:
            await asyncio.sleep(LOST_S)
            try:
                await host.start()
            except (MissingError, SandboxFailure, APIError) as error:
                _log.info("%s", message(error))
                continue
            self._on_answer(host)

    def _on_answer(self, host: Host) -> None:
        if (task := self._returns.pop(host, None)) is not None:
            _log.warning("the Docker daemon at %s answers again", host.client.url)
            task.cancel()
            self._freed.set()

    async def leave(self) -> None:
        """End the work of this process, and leave machines to their leases, for a process that opens them again by their keys."""
        await self._end(keep=True)

    async def close(self) -> None:
        """Close all machines that are open, remove snapshots, and close the connections."""
        await self._end(keep=False)

    async def _end(self, *, keep: bool) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        await self.warm_pool.close()
        await self.disk_watch.stop()
        for task in self._returns.values():
            task.cancel()
        await asyncio.gather(*self._returns.values(), return_exceptions=True)
        if keep:
            await asyncio.gather(*(self._close_proxy(machine) for machine in self._open.values()))
        else:
            await asyncio.gather(*(machine.close() for machine in list(self._open.values())))
            for host, _, label in self._snapshots:
                await _remove_snapshot(host, label)
        await asyncio.gather(*(host.close(keep=keep) for host in self._hosts_by_client.values()))

    async def __aenter__(self) -> Self:
        """Connect."""
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close."""
        await self.close()


async def _remove_snapshot(host: Host, label: str) -> None:
    try:
        for image in await host.client.call(lambda api: api.images(filters={"label": label})):
            await host.client.call(methodcaller("remove_image", image["Id"], force=True))
    except (SandboxFailure, APIError) as error:
        _log.warning("a snapshot is left to its lease: %s", message(error))


def _start_text(host: Host, spec: MachineSpec, error: APIError) -> str:
    text = message(error)
    if "/bin/sh" in text:
        return f"the image {spec.image or (spec.build and spec.build.context)} has no /bin/sh, which a machine needs: {text}"
    return f"no machine could be started at {host.client.url}: {text}"


def state_folder(config: ContainersConfig) -> Path:
    """Return the folder for results of commands."""
    if config.state is not None:
        return config.state
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "agentrl" / "containers"


def _remove_old_results(state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    for folder in state.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - OLD_STATE_S:
            shutil.rmtree(folder, ignore_errors=True)
