"""The part of `docker.APIClient` that machines use, with types."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Protocol, TypedDict

Options = dict[str, object]
"""Arguments of the SDK."""


class DaemonInfo(TypedDict, total=False):
    """What a daemon says of itself."""

    Driver: str
    Runtimes: dict[str, object]
    KernelVersion: str
    OperatingSystem: str
    CgroupVersion: str
    MemoryLimit: bool
    PidsLimit: bool
    CpuCfsQuota: bool
    NCPU: int
    MemTotal: int
    SystemTime: str
    ID: str
    Name: str
    SecurityOptions: list[str]
    ServerVersion: str


class ContainerState(TypedDict):
    """State of a container."""

    Status: str
    Running: bool
    ExitCode: int
    Error: str
    Pid: int


class ContainerDetails(TypedDict, total=False):
    """A container in full."""

    Id: str
    Image: str
    State: ContainerState
    SizeRw: int


class ContainerSummary(TypedDict):
    """A container in a list."""

    Id: str
    Names: list[str]
    Image: str
    State: str
    Created: int
    Labels: dict[str, str]


class ImageDetails(TypedDict):
    """An image."""

    Id: str
    Config: dict[str, object]


class CreatedObject(TypedDict):
    """What the daemon has made."""

    Id: str


class DockerApi(Protocol):
    """See the SDK's documentation of the methods. All raise `docker.errors.APIError` if the daemon refuses."""

    _version: str

    def close(self) -> None:
        """Close the connections."""

    def info(self) -> DaemonInfo:
        """Return what the daemon is."""

    def containers(
        self, *, all: bool = False, filters: Mapping[str, str | Sequence[str]] | None = None
    ) -> list[ContainerSummary]:
        """Return the containers that run, or all."""

    def inspect_container(self, container: str) -> ContainerDetails:
        """Return a container."""

    def create_container(self, *, name: str, **options: object) -> CreatedObject:
        """Make a container."""

    def start(self, container: str) -> None:
        """Start a container."""

    def kill(self, container: str) -> None:
        """Kill a container's processes."""

    def wait(self, container: str) -> object:
        """Wait until a container has ended."""

    def remove_container(self, container: str, *, force: bool = False, v: bool = False) -> None:
        """Remove a container."""

    def put_archive(self, container: str, path: str, data: bytes) -> bool:
        """Extract an archive in a container."""

    def get_archive(self, container: str, path: str) -> tuple[Generator[bytes, None, None], object]:
        """Return an archive of a container's files."""

    def commit(self, container: str, *, conf: Mapping[str, object] | None = None) -> CreatedObject:
        """Make an image of a container."""
