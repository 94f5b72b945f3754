"""The part of `docker.APIClient` that machines use, with types."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict

Options = dict[str, object]
"""Arguments of the SDK."""


class DaemonInfo(TypedDict, total=False):
    """What a daemon reports about itself."""

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
    IPv4Forwarding: bool
    ID: str
    Name: str
    SecurityOptions: list[str]
    ServerVersion: str
    Rootless: bool
    """Reported by Podman only."""


class Component(TypedDict):
    """A program of a daemon."""

    Name: str


class DaemonVersion(TypedDict, total=False):
    """A daemon's programs."""

    Version: str
    Components: list[Component] | None


class ContainerState(TypedDict):
    """State of a container."""

    Status: str
    Running: bool
    ExitCode: int
    Error: str
    Pid: int
    OOMKilled: bool


class HealthState(TypedDict):
    """Health of a container."""

    Status: str


class CheckedState(ContainerState, total=False):
    """State of a container that may have a health check."""

    Health: HealthState


class HostSettings(TypedDict):
    """What a container has of its host."""

    NetworkMode: str


class Endpoint(TypedDict):
    """A container in a network."""

    IPAddress: str


class NetworkSettings(TypedDict):
    """Networks of a container."""

    Networks: dict[str, Endpoint]


class ContainerDetails(TypedDict):
    """A container in full."""

    Id: str
    Name: str
    """With a slash before it."""
    Image: str
    State: CheckedState
    HostConfig: HostSettings
    NetworkSettings: NetworkSettings


class MountSummary(TypedDict):
    """A mount of a container in a list."""

    Name: NotRequired[str]
    """Name of a volume."""


class ContainerSummary(TypedDict):
    """A container in a list."""

    Id: str
    Names: list[str]
    Image: str
    State: str
    Created: int
    Labels: dict[str, str]
    SizeRw: NotRequired[int]
    """Bytes that were written to its root, if sizes were requested."""
    Mounts: NotRequired[list[MountSummary]]
    """What is mounted in it."""


class RootFS(TypedDict, total=False):
    """The file system of an image."""

    Layers: list[str]
    """Hashes of its layers, those of the image that it was built from first."""


class ImageDetails(TypedDict):
    """An image."""

    Id: str
    Config: dict[str, object]
    RootFS: RootFS


class ImageSummary(TypedDict):
    """An image in a list."""

    Id: str
    Created: int
    Labels: dict[str, str]


class NetworkSummary(TypedDict):
    """A network in a list."""

    Id: str
    Name: str
    Labels: dict[str, str]


class VolumeSummary(TypedDict):
    """A volume in a list."""

    Name: str
    Labels: dict[str, str]


class VolumeUsage(TypedDict):
    """How large a volume is."""

    Size: int
    """Bytes; -1: not known."""


class MeasuredVolume(VolumeSummary):
    """A volume with its size."""

    UsageData: VolumeUsage


class DiskUsage(TypedDict):
    """What a daemon keeps on its disk."""

    Volumes: list[MeasuredVolume] | None


class VolumeList(TypedDict):
    """Volumes; None for none."""

    Volumes: list[VolumeSummary] | None


class CreatedObject(TypedDict):
    """What the daemon has made."""

    Id: str


class ContainersApi(Protocol):
    """Containers."""

    def containers(
        self, *, all: bool = False, size: bool = False, filters: Mapping[str, str | Sequence[str]] | None = None
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


class ObjectsApi(Protocol):
    """Volumes, networks and images."""

    def volumes(self, *, filters: Mapping[str, str | Sequence[str]] | None = None) -> VolumeList:
        """Return volumes."""

    def create_volume(self, name: str, *, labels: Mapping[str, str] | None = None) -> object:
        """Make a volume."""

    def remove_volume(self, name: str) -> None:
        """Remove a volume."""

    def networks(
        self, *, names: Sequence[str] | None = None, filters: Mapping[str, str | Sequence[str]] | None = None
    ) -> list[NetworkSummary]:
        """Return networks."""

    def create_network(self, name: str, **options: object) -> CreatedObject:
        """Make a network."""

    def remove_network(self, network: str) -> None:
        """Remove a network."""

    def connect_container_to_network(self, container: str, network: str) -> None:
        """Connect a container to one more network."""

    def images(self, *, filters: Mapping[str, str | Sequence[str]] | None = None) -> list[ImageSummary]:
        """Return images."""

    def inspect_image(self, image: str) -> ImageDetails:
        """Return an image."""

    def remove_image(self, image: str, *, force: bool = False) -> object:
        """Remove an image."""


class DockerApi(ContainersApi, ObjectsApi, Protocol):
    """See the SDK's documentation of the methods. All raise `docker.errors.APIError` if the daemon refuses."""

    _version: str

    def close(self) -> None:
        """Close the connections."""

    def info(self) -> DaemonInfo:
        """Return what the daemon is."""

    def df(self) -> DiskUsage:
        """Return sizes of what the daemon keeps."""

    def version(self, *, api_version: bool = True) -> DaemonVersion:
        """Return the daemon's programs and their versions."""
