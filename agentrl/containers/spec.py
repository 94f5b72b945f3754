"""What a machine is made from: image, user, limits, network and services. Everything here can be written as JSON.

Example: ``MachineSpec(image="debian:12", memory_mb=1024, services=(ServiceSpec(name="db", image="redis:7"),))``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from agentrl.config.base import Seconds, Section
from agentrl.core.user_code import MAX_SECONDS

Network = Literal["no-network", "public", "allowlist"]
"""``no-network``: a loopback alone; ``public``: whatever the daemon's machine reaches; ``allowlist``: `MachineSpec.allowed_hosts`
through an HTTP proxy."""


class Healthcheck(Section):
    """A command that ends with status 0 when a machine or a service is ready; the times are those of Docker's health checks."""

    model_config = ConfigDict(frozen=True)

    command: str
    """Shell text."""
    interval_s: Seconds = 5.0
    """Time between two tries."""
    timeout_s: Seconds = 30.0
    """Limit of one try."""
    start_period_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)
    """Time from the start in which failed tries are not counted."""
    start_interval_s: Seconds = 5.0
    """Time between two tries in the start period."""
    retries: PositiveInt = 3
    """Failed tries, one after the other, after which it is not healthy."""


class BuildSpec(Section):
    """An image that is built where it is missing; its tag is the hash of everything in it."""

    model_config = ConfigDict(frozen=True)

    context: Path
    """Folder whose files the build may copy, without those of its ``.dockerignore``."""
    dockerfile: str = "Dockerfile"
    """Its name in the folder."""
    args: dict[str, str] = Field(default_factory=dict)
    """Build arguments."""
    timeout_s: Seconds | None = None
    """Limit of the build; None: ``containers.build_s``."""


class VolumeMount(Section):
    """A volume in a machine or a service. It begins with what the image has at its path, and ends with the machine."""

    model_config = ConfigDict(frozen=True)

    path: str
    """Where it is."""
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$")
    """Name of a volume that several of a machine's containers share; None: no other one has it."""
    read_only: bool = False
    """Whether it cannot be written here."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        return _absolute_path(path)


class ServiceSpec(Section):
    """A container next to the machine, such as a database, that the machine reaches by its name."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")
    """The host name."""
    image: str | None = None
    """The image, which the daemon has or can pull."""
    build: BuildSpec | None = None
    """The image to build, if there is no ``image``."""
    command: tuple[str, ...] | None = None
    """In place of the image's command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables."""
    user: str | None = None
    """User, or None for that of the image."""
    depends_on: tuple[str, ...] = ()
    """Services that are healthy, or have started if they have no health check, before this one starts."""
    healthcheck: Healthcheck | None = None
    """When it is ready; None: once it has started."""
    memory_mb: PositiveInt | None = None
    """Memory of all its processes, MiB; None: as the machine."""
    cpus: PositiveFloat | None = None
    """Cores; None: as the machine."""
    volumes: tuple[VolumeMount, ...] = ()
    """Volumes."""

    @model_validator(mode="after")
    def _has_image(self) -> ServiceSpec:
        check_image(f"service {self.name}", self.image, self.build)
        return self


class MachineSpec(Section):
    """A machine. Two machines of equal specs start in the same state."""

    model_config = ConfigDict(frozen=True)

    image: str | None = None
    """The image: a name, a tag or an id, which is pulled where it is missing. It needs a ``/bin/sh``, and nothing else."""
    build: BuildSpec | None = None
    """The image to build, if there is no ``image``."""
    user: str | None = None
    """User whom commands run as; None: that of the image, which is mostly root."""
    workdir: str | None = None
    """Folder in which commands start; None: that of the image. It is made if there is none."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all commands, in addition to those of the image."""
    cpus: PositiveFloat = 1.0
    """Cores that all processes together may keep busy."""
    memory_mb: int = Field(default=2048, ge=16)
    """Memory of all processes together, MiB; there is no swap."""
    disk_mb: int = Field(default=10240, ge=1)
    """Size of all that is written to the root, MiB."""
    processes: int = Field(default=512, ge=8)
    """Processes and threads at the same time."""
    network: Network = "public"
    """What the machine reaches."""
    allowed_hosts: tuple[str, ...] = ()
    """With ``allowlist``: host names, ``*.name``, addresses and networks such as ``10.0.0.0/8``."""
    services: tuple[ServiceSpec, ...] = ()
    """Containers next to it, started first."""
    volumes: tuple[VolumeMount, ...] = ()
    """Volumes; what is written there counts for ``disk_mb``."""
    healthcheck: Healthcheck | None = None
    """When the machine is ready; None: once it has started."""
    runtime: str | None = None
    """Runtime with its own kernel, by its name at the daemon, such as ``runsc`` (gVisor); None: ``containers.runtime``."""

    @model_validator(mode="after")
    def _has_image(self) -> MachineSpec:
        check_image("a machine", self.image, self.build)
        return self

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str | None) -> str | None:
        return workdir if workdir is None else _absolute_path(workdir)

    @model_validator(mode="after")
    def _fits(self) -> MachineSpec:
        if self.allowed_hosts and self.network != "allowlist":
            raise ValueError(f"allowed_hosts needs network=allowlist, not {self.network}")
        names = {service.name for service in self.services}
        if len(names) < len(self.services):
            raise ValueError("two services have the same name")
        for service in self.services:
            if unknown := set(service.depends_on) - names:
                raise ValueError(f"service {service.name} depends on {', '.join(sorted(unknown))}, which is no service")
        services_in_order(self.services)
        return self

    @property
    def volume_names(self) -> tuple[str, ...]:
        """Names of volumes of the machine and its services."""
        mounts = [*self.volumes, *(volume for service in self.services for volume in service.volumes)]
        return tuple(dict.fromkeys(mount.name for mount in mounts if mount.name is not None))

    @property
    def digest(self) -> str:
        """Hash of everything in it: 16 hexadecimal digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def _absolute_path(path: str) -> str:
    if not PurePosixPath(path).is_absolute():
        raise ValueError(f"{path!r} is no absolute path")
    return path


def check_image(owner: str, image: str | None, build: BuildSpec | None) -> None:
    """Check that there is an image or a build, and not both.

    Raises:
        ValueError: that is not so.
    """
    if (image is None) == (build is None):
        raise ValueError(f"{owner} needs either an image or a build")


def services_in_order(services: tuple[ServiceSpec, ...]) -> list[ServiceSpec]:
    """Return services so that each comes after those that it depends on.

    Raises:
        ValueError: services depend on each other in a circle.
    """
    ordered: dict[str, ServiceSpec] = {}
    while len(ordered) < len(services):
        ready = [
            service for service in services if service.name not in ordered and set(service.depends_on) <= ordered.keys()
        ]
        if not ready:
            names = sorted({service.name for service in services} - ordered.keys())
            raise ValueError(f"services depend on each other in a circle: {', '.join(names)}")
        ordered |= {service.name: service for service in ready}
    return list(ordered.values())
