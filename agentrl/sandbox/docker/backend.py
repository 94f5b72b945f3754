"""The backend ``docker``: a container per sandbox; its runner is reached over attached standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from typing_extensions import override

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import raise_file_limit
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure
from agentrl.sandbox.base import ALL_DEFENCES, Defence
from agentrl.sandbox.cgroup import CGROUP_VARIABLE, SOCKETS_FILE, server_gone, server_name, sockets_bytes
from agentrl.sandbox.docker.container import ContainerReader, MemoryKills, attach, open_stream
from agentrl.sandbox.docker.options import EGRESS_SOCKET, container_options, with_egress
from agentrl.sandbox.egress import EgressProxy, own_address, receive_listener
from agentrl.sandbox.runner_sandbox import READY_S, RunnerBackend, RunnerSandbox

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
ID_LABEL, SERVER_LABEL, HOST_LABEL, BOOT_LABEL, SESSION_LABEL = (
    f"agentrl.{name}" for name in ("sandbox", "server", "host", "boot", "session")
)
FAULTS = (DockerException, OSError)
"""Exceptions of the SDK: its own, and those of requests, which are OSError."""
OLDEST_PYTHON = (3, 9)
REQUEST_TIMEOUT_S = 60
"""Seconds the daemon may take for one request."""
THREADS = 16
END_S = 5.0
"""Seconds within which the daemon notices the end of a container whose stream has ended."""


class DockerSandbox(RunnerSandbox):
    """A container with the sandbox's id as its name."""

    backend: DockerBackend
    reader: ContainerReader
    writer: asyncio.StreamWriter
    memory_kills: MemoryKills
    egress_listener: socket.socket | None = None
    proxy: EgressProxy | None = None

    async def python_version(self) -> tuple[int, int]:
        """Return major and minor version of Python inside.

        Raises:
            SandboxFailure: the runner does not answer, for example because it does not run on that version.
        """
        reply, _ = await self._request({"op": "ping"}, READY_S)
        major, minor = reply["python"].split(".")[:2]
        return int(major), int(minor)

    def _oom_kills(self) -> int:
        return self.memory_kills.count()

    async def _destroy(self) -> None:
        self.memory_kills.close()
        # Removing a container with an attached stream takes the daemon ten seconds.
        self.writer.transport.abort()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        if self.proxy is not None:
            await self.proxy.close()
        elif self.egress_listener is not None:
            self.egress_listener.close()
        await self.backend.remove(self.id)

    async def _describe_end(self) -> str:
        state = await self.backend.last_state(self.id)
        if state is None:
            return f"no Docker daemon answers at {self.backend.url}"
        await self.memory_kills.count_end(state["OOMKilled"], lambda: self.backend.oom_reports(self.id))
        stderr = self.reader.stderr.decode("utf-8", "replace").strip()
        texts = [f"container {state['Status']}, exit status {state['ExitCode']}", state["Error"], stderr]
        return ": ".join(text for text in texts if text)


class DockerBackend(RunnerBackend[DockerSandbox]):
    """Runs each sandbox as a container of the daemon at ``sandbox.docker_url``.

    The parent of the containers' cgroups, as the daemon's cgroup driver names it, is the value of `CGROUP_VARIABLE`, and without
    that the daemon's default.
    """

    name: ClassVar[str] = "docker"
    has_images: ClassVar[bool] = True

    def __init__(self, config: SandboxConfig, defences: frozenset[Defence] = ALL_DEFENCES) -> None:
        super().__init__(config, defences)
        self.url = _daemon_url(config)
        self._api: Any = None
        self._origin: str | None = None
        self._machine_kernel = ""
        self._options: dict[str, Any] = {}
        self._to_remove: set[str] = set()
        """Names of containers to remove; those stay that could not be removed yet."""

    @property
    def machine_kernel(self) -> str:
        """Release of the kernel of the daemon's machine."""
        return self._machine_kernel

    @override
    def forward(self, host: str) -> str:
        self._origin = host
        return own_address()

    @classmethod
    def check(cls, config: SandboxConfig) -> None:
        """Check that a daemon's socket is there. A daemon on another machine is only checked by `start`."""
        url = _daemon_url(config)
        if not url.startswith("unix://"):
            return
        path = Path(url.removeprefix("unix://"))
        if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
            raise MissingError(
                f"sandbox.backend=docker, but no daemon listens at {path}: start dockerd, or set sandbox.docker_url or "
                "DOCKER_HOST to where one does"
            )

    async def start(self) -> None:
        """Remove what servers that died have left, and open a first sandbox to check that it works."""
        _check_url(self.config, self.url)
        raise_file_limit()  # two per sandbox
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        try:
            await self._in_thread(self._prepare)
            sandbox = await self.open("start")
            async with sandbox:
                assert isinstance(sandbox, DockerSandbox)
                version = await sandbox.python_version()
            if version < OLDEST_PYTHON:
                raise MissingError(
                    f"sandbox.image={self.config.image} has Python {version[0]}.{version[1]}; 3.9 or newer is needed"
                )
        except BaseException as error:
            await self.close()
            if isinstance(error, SandboxFailure):
                raise MissingError(
                    f"sandbox.image={self.config.image} with sandbox.python={self.config.python} does not work: {error}"
                ) from error
            raise

    def _prepare(self) -> None:
        try:
            self._api = docker.APIClient(
                base_url=self.url, version="auto", timeout=REQUEST_TIMEOUT_S, max_pool_size=THREADS
            )
            info = self._api.info()
        except FAULTS as error:
            raise MissingError(
                f"no Docker daemon answers at {self.url} ({_message(error)}): start it (Debian: apt install docker.io), set "
                "sandbox.docker_url to one that runs, or set sandbox.backend=bubblewrap"
            ) from error
        unbounded = [
            resource for resource, key in (("memory", "MemoryLimit"), ("processes", "PidsLimit")) if not info.get(key)
        ]
        if unbounded and not self.config.accept_no_memory_limit:
            raise MissingError(
                f"the Docker daemon at {self.url} cannot limit {' and '.join(unbounded)}: it needs cgroups (a rootless "
                "one: delegated ones); or set sandbox.accept_no_memory_limit=true"
            )
        runtime = self.config.runtime
        # A name with a dot is that of a shim, which the daemon finds by itself.
        if runtime is not None and "." not in runtime and runtime not in info["Runtimes"]:
            installed_runtimes = ", ".join(sorted(info["Runtimes"]))
            raise MissingError(
                f"sandbox.runtime={runtime}, but the Docker daemon at {self.url} has only {installed_runtimes}: install it and "
                "register it with the daemon (gVisor: `runsc install`)"
            )
        self._machine_kernel = info["KernelVersion"]
        try:
            image = self._api.inspect_image(self.config.image)
        except ImageNotFound as error:
            raise MissingError(
                f"the Docker daemon at {self.url} has no image {self.config.image}: run `docker pull "
                f"{self.config.image}`, or set sandbox.image to one that it has"
            ) from error
        self._sockets_apart = info.get("CgroupVersion", "1") == "1"  # old daemons have no other, and do not say so
        self._options = container_options(self.config, self.defences, info, image, os.environ.get(CGROUP_VARIABLE))
        self._labels = {SERVER_LABEL: server_name(), HOST_LABEL: socket.gethostname(), BOOT_LABEL: _boot_id()}
        self._reap()

    def _reap(self) -> None:
        for container in self._api.containers(all=True, filters={"label": [ID_LABEL, SERVER_LABEL]}):
            if is_left_behind(container["Labels"]):
                _log.warning("removing a sandbox that a tool server left behind: %s", container["Labels"][ID_LABEL])
                self._remove_now(container["Id"])

    async def _start_sandbox(self, session_id: str) -> DockerSandbox:
        await self._remove_containers()
        name = f"agentrl-{uuid.uuid4().hex[:12]}"
        try:
            sock, memory_kills, egress_listener = await self._in_thread(lambda: self._make(name, session_id))
            reader, writer = await open_stream(sock)
        except (*FAULTS, SandboxFailure) as error:
            self._to_remove.add(name)
            await self._remove_containers()
            raise SandboxFailure(f"no container could be started at {self.url}: {_message(error)}") from error
        sandbox = DockerSandbox(name, reader, writer, self.config.limits, self.defences)
        sandbox.backend, sandbox.reader, sandbox.writer = self, reader, writer
        sandbox.memory_kills, sandbox.egress_listener = memory_kills, egress_listener
        memory_kills.watch()
        return sandbox

    async def _await_ready(self, sandbox: DockerSandbox) -> None:
        if sandbox.egress_listener is not None:
            sandbox.proxy = EgressProxy(self.config.hosts, self._origin)
            await sandbox.proxy.start(sandbox.egress_listener)
        await sandbox.ready()

    def _make(self, name: str, session_id: str) -> tuple[socket.socket, MemoryKills, socket.socket | None]:
        """Return the stream to a new container, the count of its memory kills, and the egress listener, if any."""
        labels = {**self._labels, ID_LABEL: name, SESSION_LABEL: session_id}
        with ExitStack() as until_started:
            options, handover = self._options, None
            if self.config.hosts and Defence.NETWORK in self.defences:
                folder = Path(until_started.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-egress-")))
                handover = until_started.enter_context(_handover_socket(folder))
                options = with_egress(options, folder)
            self._api.create_container(name=name, labels=labels, **options)
            sock = attach(self._api, name)
            try:
                self._api.start(name)
                egress_listener = _receive_listener(handover) if handover is not None else None
                container = self._api.inspect_container(name)
                memory_kills = MemoryKills(container["Id"], container["State"]["Pid"])
                if self._sockets_apart and Defence.MEMORY in self.defences:
                    self._limit_sockets(name, memory_kills.file)
            except BaseException:
                sock.close()
                raise
            return sock, memory_kills, egress_listener

    def _limit_sockets(self, name: str, memory_file: Path | None) -> None:
        """Limit the memory of a container's sockets on cgroup version 1, which runc does not, whatever Docker requests.

        Args:
            name: of the container.
            memory_file: a file in the container's memory cgroup; None if that is on another machine.
        """
        try:
            if memory_file is not None:
                memory_file.with_name(SOCKETS_FILE).write_text(str(sockets_bytes(self.config.limits)))
                return
            why = "the daemon is on another machine"
        except OSError as error:
            why = str(error)
        if not self._api.inspect_container(name)["State"]["Running"]:
            return  # it has ended at once, and its cgroup with it; the wait for its runner reports that
        if not self.config.accept_no_memory_limit:
            raise SandboxFailure(
                f"the memory of its sockets cannot be limited ({why}): with cgroup version 1 this needs a tool server on the "
                "daemon's machine, as root; use version 2, or set sandbox.accept_no_memory_limit=true"
            )

    async def last_state(self, name: str) -> Mapping[str, Any] | None:
        """Return the daemon's ``State`` of a container that has ended or is about to; None if no daemon answers."""
        deadline = asyncio.get_running_loop().time() + END_S
        while True:
            try:
                state: dict[str, Any] = (await self._in_thread(lambda: self._api.inspect_container(name)))["State"]
            except NotFound:
                return {"Status": "removed by another program", "ExitCode": "unknown", "Error": "", "OOMKilled": False}
            except FAULTS:
                return None
            if not state["Running"] or asyncio.get_running_loop().time() > deadline:
                return state
            await asyncio.sleep(0.02)

    async def oom_reports(self, name: str) -> int:
        """Return how often the daemon has reported lack of memory in a container; 0 if no daemon answers."""
        filters = {"container": name, "event": "oom"}
        try:
            return await self._in_thread(
                lambda: len(list(self._api.events(since="1", until=f"{time.time():.6f}", filters=filters)))
            )
        except FAULTS:
            return 0

    async def remove(self, name: str) -> None:
        """Remove a container; if no daemon answers, as soon as one does."""
        self._to_remove.add(name)
        await self._remove_containers()

    async def _remove_containers(self) -> None:
        """Remove containers, those included that could not be removed before."""
        names, self._to_remove = self._to_remove, set()
        removed = await asyncio.gather(*(self._in_thread(partial(self._try_remove, name)) for name in names))
        self._to_remove |= {name for name, was_removed in zip(names, removed, strict=True) if not was_removed}

    def _try_remove(self, name: str) -> bool:
        try:
            self._remove_now(name)
        except FAULTS as error:
            _log.warning("container %s is not removed yet: %s", name, _message(error))
            return False
        return True

    def _remove_now(self, name: str) -> None:
        try:
            self._api.remove_container(name, force=True, v=True)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != 409:  # 409: it is being removed already
                raise

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def close(self) -> None:
        """Close all sandboxes, those being opened included, and the connection to the daemon."""
        await self._close_sandboxes()
        await self._remove_containers()
        if self._to_remove:
            _log.error(
                "these containers could not be removed, the next start removes them: %s",
                ", ".join(sorted(self._to_remove)),
            )
            self._to_remove.clear()
        await asyncio.to_thread(self._threads.shutdown)
        if self._api is not None:
            self._api.close()


def _daemon_url(config: SandboxConfig) -> str:
    return config.docker_url or os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET


def _check_url(config: SandboxConfig, url: str) -> None:
    if not url.startswith(("unix://", "tcp://", "http://")) or os.environ.get("DOCKER_TLS_VERIFY"):
        raise ConfigError(
            f"the Docker daemon at {url}: only unix:// and tcp:// without TLS are supported. Forward a remote daemon's "
            "socket with `ssh -L /tmp/docker.sock:/var/run/docker.sock HOST` and set sandbox.docker_url=unix:///tmp/docker.sock"
        )
    if config.hosts and not url.startswith("unix://"):
        raise ConfigError(
            f"sandbox.hosts with the Docker daemon at {url}: egress needs a Unix socket shared with the container; use a daemon "
            "on this machine, or sandbox.backend=bubblewrap"
        )


def _handover_socket(folder: Path) -> socket.socket:
    """Return a listening Unix socket in a folder, to which a container's user can connect."""
    folder.chmod(0o711)
    handover = socket.socket(socket.AF_UNIX)
    handover.settimeout(READY_S)
    handover.bind(str(folder / EGRESS_SOCKET))
    (folder / EGRESS_SOCKET).chmod(0o666)
    handover.listen(1)
    return handover


def _receive_listener(handover: socket.socket) -> socket.socket:
    """Return the socket on which the runner listens inside."""
    try:
        channel, _ = handover.accept()
    except TimeoutError as error:
        raise SandboxFailure("the runner gave no socket for sandbox.hosts") from error
    with channel:
        return receive_listener(channel)


def is_left_behind(labels: Mapping[str, str]) -> bool:
    """Return whether a container's server was of this host and has ended."""
    if labels.get(HOST_LABEL) != socket.gethostname():
        return False
    return labels.get(BOOT_LABEL) != _boot_id() or server_gone(labels[SERVER_LABEL])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _message(error: BaseException) -> str:
    explanation = error.explanation if isinstance(error, APIError) else None
    return str(explanation or error)
