"""A connection to one Docker daemon: the SDK's calls in threads, and what the daemon can do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import docker
from docker.errors import APIError, DockerException

from agentrl.containers.docker_api import DaemonInfo, DaemonVersion, DockerApi
from agentrl.core.errors import MissingError, SandboxFailure

if TYPE_CHECKING:  # pydantic takes half as long to import as Docker's SDK; the reaper and builds need it not
    from agentrl.config.containers import ContainersConfig

_T = TypeVar("_T")

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
FAULTS = (DockerException, OSError)
"""Exceptions of the SDK: its own, and those of requests, which are OSError."""
REQUEST_TIMEOUT_S = 120
THREADS = 32


class HostLostError(SandboxFailure):
    """A Docker daemon that cannot be reached; machines on it are lost."""


class NoDaemonError(MissingError):
    """No Docker daemon answers at an address."""


class DaemonClient:
    """One daemon.

    Args:
        url: ``unix://`` or ``tcp://``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.info: DaemonInfo = {}
        """The daemon's description of itself, once it is connected."""
        self._api: DockerApi | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="containers")

    @property
    def version(self) -> str:
        """Version of the API."""
        return self._connected._version

    @property
    def _connected(self) -> DockerApi:
        assert self._api is not None, "call connect() first"
        return self._api

    async def connect(self) -> None:
        """Connect, and read what the daemon is.

        Raises:
            NoDaemonError: no daemon answers.
        """
        try:
            self._api = await self._in_thread(
                lambda: docker.APIClient(
                    base_url=self.url, version="auto", timeout=REQUEST_TIMEOUT_S, max_pool_size=THREADS
                )
            )
            self.info = await self.call(lambda api: api.info())
        except (*FAULTS, HostLostError) as error:
            raise NoDaemonError(
                f"no Docker daemon answers at {self.url} ({message(error)}): start it (Debian: apt install docker.io), or set "
                "containers.hosts or DOCKER_HOST to those that run"
            ) from error

    async def call(self, function: Callable[[DockerApi], _T]) -> _T:
        """Return ``function(api)``, run in a thread with the SDK's `docker.APIClient`.

        Raises:
            APIError: the daemon refuses.
            HostLostError: it does not answer.
        """
        try:
            return await self._in_thread(lambda: function(self._connected))
        except APIError:
            raise
        except FAULTS as error:
            raise HostLostError(f"the Docker daemon at {self.url} does not answer: {message(error)}") from error

    async def close(self) -> None:
        """Close the connection, once its calls have ended."""
        await asyncio.to_thread(self._threads.shutdown)
        if self._api is not None:
            self._api.close()

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


def is_podman(version: DaemonVersion) -> bool:
    """Return whether a daemon is Podman, by its version."""
    return any("Podman" in component["Name"] for component in version.get("Components") or ())


def daemon_urls(config: ContainersConfig) -> Sequence[str]:
    """Return the addresses of the daemons."""
    return config.hosts or (os.environ.get("DOCKER_HOST") or DEFAULT_SOCKET,)


def message(error: BaseException) -> str:
    """Return the daemon's own words, if there are any."""
    explanation = error.explanation if isinstance(error, APIError) else None
    return str(explanation or error)
