"""``task.toml`` of a container task: Harbor's schema 1.4."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from agentrl.config.base import Section

SCHEMA_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
"""Versions of the schema that are read; the fields of the last one contain those of the others."""
MAIN = "main"
"""The service in which the agent works."""
ARTIFACTS = "/logs/artifacts"
"""The folder whose files are artifacts without being named."""

NetworkMode = Literal["no-network", "public", "allowlist"]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_STEP = re.compile(r'[^<>:"/\\|?*\x00-\x1f\x7f]+')
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[1-9¹²³])", re.IGNORECASE)
"""Names that Windows does not allow for folders."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_SECRET = re.compile(r"KEY|SECRET|TOKEN(?!S)|PASSWORD|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
"""Names of headers and variables with credentials."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""``${NAME}`` or ``${NAME:-default}`` in a text."""
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
"""MiB of the units of ``memory`` and ``storage``."""


def _allowed_host(host: str) -> str:
    """Return a host name, ``*.name``, address or network in its usual form."""
    name = host.strip().lower().rstrip(".")
    try:
        if "%" not in name:
            return (ip_network(name) if "/" in name else ip_address(name)).compressed
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    is_address = all(label.isdigit() for label in labels)
    if "/" in name or is_address or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(
            f"{host!r} is no host name, *.name, IP address or network such as 10.0.0.0/8; ports are not named"
        )
    return name


def _service(name: str) -> str:
    if not _SERVICE.fullmatch(name.strip()):
        raise ValueError(f"{name!r} is no name of a service of Docker Compose")
    return name.strip()


AllowedHost = Annotated[str, AfterValidator(_allowed_host)]
ServiceName = Annotated[str, AfterValidator(_service)]


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """What a container may reach."""

    mode: NetworkMode = "public"
    """``no-network``, ``public`` or ``allowlist``."""
    allowed_hosts: tuple[str, ...] = ()
    """With ``allowlist``: host names, ``*.name``, addresses and networks."""


class NetworkToml(Section):
    """The network of a phase; without a mode, that of the environment."""

    network_mode: NetworkMode | None = None
    """What is reachable."""
    allowed_hosts: list[AllowedHost] | None = None
    """With ``allowlist``: what is reachable, by name, ``*.name``, address or network."""

    @model_validator(mode="after")
    def _check_hosts(self) -> NetworkToml:
        if self.network_mode is None and self.allowed_hosts is not None:
            raise ValueError("allowed_hosts is for network_mode='allowlist', which is not set")
        if self.network_mode not in (None, "allowlist") and self.allowed_hosts:
            raise ValueError(f"allowed_hosts is for network_mode='allowlist', not for {self.network_mode!r}")
        return self

    @property
    def policy(self) -> NetworkPolicy | None:
        """The policy that this phase sets; None if it sets none."""
        return None if self.network_mode is None else NetworkPolicy(self.network_mode, tuple(self.allowed_hosts or ()))


class AuthorToml(Section):
    """An author."""

    name: str
    """Name."""
    email: str | None = None
    """Address."""


class PackageToml(Section):
    """``[task]``: the task as a package."""

    name: str
    """``organization/name``."""
    version: str | None = Field(default=None, min_length=1)
    """Version of the task."""
    description: str = ""
    """What it is about."""
    authors: list[AuthorToml] = Field(default_factory=list)
    """Who wrote it."""
    keywords: list[str] = Field(default_factory=list)
    """Words to search for."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _PACKAGE.fullmatch(name) or ".." in name:
            raise ValueError("it must be organization/name, of letters, digits, '-', '_' and '.'")
        return name


class HealthcheckToml(Section):
    """A command that tells whether a container is ready."""

    command: str
    """Shell command; exit code 0 is ready."""
    interval_sec: PositiveFloat = 5.0
    """Seconds between two runs."""
    timeout_sec: PositiveFloat = 30.0
    """Seconds that a run may take."""
    start_period_sec: NonNegativeFloat = 0.0
    """Seconds after the start in which failures do not count."""
    start_interval_sec: PositiveFloat = 5.0
    """Seconds between two runs in that time."""
    retries: PositiveInt = 3
    """Failures one after the other that end the start."""


class TpuToml(Section):
    """A slice of TPUs."""

    type: str = Field(min_length=1)
    """Kind of accelerator, such as ``v6e``."""
    topology: str
    """Sizes, such as ``2x4``."""

    @field_validator("topology")
    @classmethod
    def _check_topology(cls, topology: str) -> str:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", topology.strip()):
            raise ValueError("it must be whole numbers with x between them, such as 2x4")
        return topology.strip()


class McpServerToml(Section):
    """An MCP server that the agent may use."""

    name: str
    """Its name; a later server of the same name takes its place."""
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    """How it is reached; ``http`` is ``streamable-http``."""
    url: str | None = None
    """Its address, for the transports over HTTP."""
    command: str | None = None
    """The program in the container, for ``stdio``."""
    args: list[str] = Field(default_factory=list)
    """The program's arguments."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of requests; ``${NAME}`` and ``${NAME:-default}`` are variables of this machine."""

    @field_validator("transport", mode="before")
    @classmethod
    def _rename_http(cls, transport: object) -> object:
        return "streamable-http" if transport == "http" else transport

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a header")
            if "\r" in value or "\n" in value or "${" in _REFERENCE.sub("", value):
                raise ValueError(f"header {name} must be one line, with variables as ${{NAME}} or ${{NAME:-default}}")
            _check_credentials(name, value)
        return headers

    @model_validator(mode="after")
    def _check_transport(self) -> McpServerToml:
        needed = "command" if self.transport == "stdio" else "url"
        if not getattr(self, needed):
            raise ValueError(f"transport={self.transport!r} needs {needed}")
        if self.transport == "stdio" and self.headers:
            raise ValueError("headers are for the transports over HTTP, not for 'stdio'")
        return self


def _check_credentials(name: str, value: str) -> None:
    """Refuse a credential in a file: it must be a variable without a default."""
    has_default = any(
        default and (_SECRET.search(name) or _SECRET.search(variable))
        for variable, default in _REFERENCE.findall(value)
    )
    text = re.sub(r"^\s*[A-Za-z]+\s+(?=\$)", "", value)  # such as Bearer
    if has_default or (_SECRET.search(name) and _REFERENCE.sub("", text).strip(" :-\t")):
        raise ValueError(
            f"header {name} must name its credential as a variable without default, as in 'Bearer ${{TOKEN}}'"
        )


class EnvironmentToml(Section):
    """``[environment]``: the container in which the agent works; ``[verifier.environment]``: that of the tests."""

    build_timeout_sec: PositiveFloat = 600.0
    """Seconds that a build may take."""
    docker_image: str | None = None
    """The image, in place of ``environment/Dockerfile``."""
    os: Literal["linux", "windows"] = "linux"
    """System of the container."""
    cpus: PositiveFloat | None = None
    """Cores."""
    memory_mb: PositiveInt | None = None
    """Memory, MiB."""
    storage_mb: PositiveInt | None = None
    """Disk, MiB."""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs."""
    gpu_types: list[str] | None = None
    """Kinds of GPU of which it needs one; None: any."""
    tpu: TpuToml | None = None
    """TPUs."""
    mcp_servers: list[McpServerToml] = Field(default_factory=list)
    """MCP servers for the agent."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables; ``${NAME}`` and ``${NAME:-default}`` are variables of this machine."""
    skills_dir: str | None = None
    """Folder in the container with skills for the agent."""
    healthcheck: HealthcheckToml | None = None
    """Tells when the container is ready."""
    workdir: str | None = None
    """Working folder, in place of the image's."""
    network_mode: NetworkMode = "public"
    """What is reachable."""
    allowed_hosts: list[AllowedHost] | None = None
    """With ``allowlist``: what is reachable, by name, ``*.name``, address or network."""

    @model_validator(mode="before")
    @classmethod
    def _rename_old_keys(cls, values: object) -> object:
        """Read ``memory``, ``storage`` and ``allow_internet`` of older schemas."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in values:
                size = _size_mb(old, values.pop(old))
                if values.setdefault(new, size) != size:
                    raise ValueError(f"{old} is {size} MiB, and {new}={values[new]}; leave out {old}")
        allow_internet = values.pop("allow_internet", None)
        if not isinstance(allow_internet, bool | None):
            raise ValueError(f"allow_internet={allow_internet!r} is neither true nor false")
        if allow_internet is not None and not {"network_mode", "allowed_hosts"} & set(values):
            values["network_mode"] = "public" if allow_internet else "no-network"
        return values

    @field_validator("os", mode="before")
    @classmethod
    def _lower_os(cls, name: object) -> object:
        return name.lower() if isinstance(name, str) else name

    @model_validator(mode="after")
    def _check_hosts(self) -> EnvironmentToml:
        if self.network_mode != "allowlist" and self.allowed_hosts:
            raise ValueError(f"allowed_hosts is for network_mode='allowlist', not for {self.network_mode!r}")
        return self

    @property
    def policy(self) -> NetworkPolicy:
        """What the container may reach."""
        return NetworkPolicy(self.network_mode, tuple(self.allowed_hosts or ()))


def _size_mb(key: str, size: object) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([GMK])", size.strip().upper()) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{key}={size!r} must be a size such as '2G' or '512M'; the key of the schema is {key}_mb")
    return int(float(match[1]) * _SIZES[match[2]])


class AgentToml(NetworkToml):
    """``[agent]``: how the agent works."""

    timeout_sec: PositiveFloat | None = None
    """Seconds that it has; None: no limit."""
    user: str | None = None
    """User, by name or number; None: the image's."""


class CollectToml(Section):
    """A command that writes down the state of a service after the agent, for the tests."""

    command: str
    """Shell command."""
    service: ServiceName = MAIN
    """Where it runs."""
    timeout_sec: PositiveFloat = 60.0
    """Seconds that it may take."""
    user: str | None = None
    """User, by name or number; None: the image's."""


class VerifierToml(NetworkToml):
    """``[verifier]``: how the tests run."""

    timeout_sec: PositiveFloat = 600.0
    """Seconds that they have."""
    env: dict[str, str] = Field(default_factory=dict)
    """Their environment variables; ``${NAME}`` and ``${NAME:-default}`` are variables of this machine."""
    user: str | None = None
    """Their user, by name or number; None: the image's."""
    environment_mode: Literal["shared", "separate"] | None = None
    """In the agent's container, or in another one. None: ``separate`` with an ``environment``, else ``shared``."""
    environment: EnvironmentToml | None = None
    """The other container; None: a new one like the agent's."""
    collect: list[CollectToml] = Field(default_factory=list)
    """Commands after the agent and before the artifacts are copied."""

    @model_validator(mode="after")
    def _check_mode(self) -> VerifierToml:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode='shared' has no environment of its own; leave one of them out")
        return self

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode that this section sets; None if it sets none."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


class SolutionToml(Section):
    """``[solution]``: the reference solution."""

    env: dict[str, str] = Field(default_factory=dict)
    """Its environment variables; ``${NAME}`` and ``${NAME:-default}`` are variables of this machine."""


class ArtifactToml(Section):
    """A file or folder that is carried out of the agent's container."""

    source: str = Field(min_length=1)
    """Path in the container; relative ones begin at the working folder."""
    destination: str | None = None
    """Path below the folder of artifacts on this machine; None: as ``source``. The tests have it at ``source``."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of files in the folder to leave out."""
    service: ServiceName | None = None
    """The service that has it; None: the agent's."""

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if ".." in PurePosixPath(source).parts:
            raise ValueError("it must not contain '..'")
        return source

    @field_validator("destination")
    @classmethod
    def _check_destination(cls, destination: str | None) -> str | None:
        if not destination:
            return None
        path = PurePosixPath(destination)
        if path.is_absolute() or ".." in path.parts or "\\" in destination or not path.parts:
            raise ValueError("it must be a relative path without '..' and '\\'")
        if str(path) == "manifest.json":
            raise ValueError("manifest.json is the name of the list of artifacts")
        return destination

    @model_validator(mode="after")
    def _check_service(self) -> ArtifactToml:
        is_absolute = self.source.startswith("/") or re.match(r"[A-Za-z]:[/\\]", self.source)
        if self.service not in (None, MAIN) and not is_absolute:
            raise ValueError(f"the source {self.source!r} of service {self.service!r} must be an absolute path")
        return self


def _artifact(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


Artifact = Annotated[ArtifactToml, BeforeValidator(_artifact)]
"""An artifact; a text is its source."""


class StepToml(Section):
    """``[[steps]]``: one of several steps in the same container."""

    name: str
    """Its folder below ``steps/``."""
    agent: AgentToml = Field(default_factory=AgentToml)
    """As ``[agent]``; keys that are not set are those of the task."""
    verifier: VerifierToml = Field(default_factory=VerifierToml)
    """As ``[verifier]``; keys that are not set are those of the task."""
    min_reward: float | dict[str, float] | None = None
    """Least reward, or rewards by name, with which the next step begins."""
    healthcheck: HealthcheckToml | None = None
    """Tells when the step may begin, in addition to that of the environment."""
    artifacts: list[Artifact] = Field(default_factory=list)
    """In addition to those of the task."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        is_device = _DEVICE.fullmatch(name.partition(".")[0].rstrip(" "))
        if not _STEP.fullmatch(name) or not name.strip() or name.endswith((".", " ")) or is_device:
            raise ValueError(f"{name!r} is no name that a folder has on every system")
        if len(name.encode()) > 255:
            raise ValueError("it has more than 255 bytes")
        return name


class TaskToml(Section):
    """``task.toml``."""

    schema_version: str = SCHEMA_VERSIONS[-1]
    """Version of the schema."""
    source: str | None = None
    """The data set that it is from."""
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    """The reward of several steps: the mean, or that of the last one. None: ``mean``."""
    artifacts: list[Artifact] = Field(default_factory=list)
    """Files and folders that are carried out of the agent's container."""
    task: PackageToml | None = None
    """The task as a package."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Anything."""
    agent: AgentToml = Field(default_factory=AgentToml)
    """How the agent works."""
    verifier: VerifierToml = Field(default_factory=VerifierToml)
    """How the tests run."""
    environment: EnvironmentToml = Field(default_factory=EnvironmentToml)
    """The container in which the agent works."""
    solution: SolutionToml = Field(default_factory=SolutionToml)
    """The reference solution."""
    steps: list[StepToml] | None = None
    """Steps one after the other; None: the task is one step."""

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, values: object) -> object:
        if isinstance(values, Mapping) and "version" in values:
            values = dict(values)
            version = values.pop("version")
            values.setdefault("schema_version", version)
        return values

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, version: str) -> str:
        if version not in SCHEMA_VERSIONS:
            raise ValueError(f"agentrl reads versions {SCHEMA_VERSIONS[0]} to {SCHEMA_VERSIONS[-1]}")
        return version

    @field_validator("steps")
    @classmethod
    def _check_steps(cls, steps: list[StepToml] | None) -> list[StepToml] | None:
        names = [unicodedata.normalize("NFC", step.name).casefold() for step in steps or ()]
        twice = [step.name for step, name in zip(steps or (), names, strict=True) if names.count(name) > 1]
        if twice:
            raise ValueError(f"two steps are named {twice[0]!r}")
        return steps


def with_artifacts_folder(artifacts: Sequence[ArtifactToml]) -> tuple[ArtifactToml, ...]:
    """Return artifacts with `ARTIFACTS` before them, unless it is named."""
    names_folder = any(
        artifact.source.rstrip("/") == ARTIFACTS and artifact.service in (None, MAIN) for artifact in artifacts
    )
    return tuple(artifacts) if names_folder else (ArtifactToml(source=ARTIFACTS), *artifacts)


def expand_variables(values: Mapping[str, str], environ: Mapping[str, str], key: str) -> dict[str, str]:
    """Return variables with the values of this machine.

    Args:
        values: a value ``${NAME}`` or ``${NAME:-default}`` is that of the variable; any other is taken as it is.
        environ: variables of this machine.
        key: of ``values``, for messages.

    Raises:
        ValueError: a variable is not set and has no default.
    """
    expanded = {}
    for name, value in values.items():
        match = re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value)
        expanded[name] = value if match is None else _variable(match[1], match[2], environ, f"{key}.{name}")
    return expanded


def expand_header(value: str, environ: Mapping[str, str], key: str) -> str:
    """Return a header of an MCP server with the values of this machine; see `expand_variables`."""
    return _REFERENCE.sub(lambda match: _variable(match[1], match[2], environ, key), value)


def _variable(name: str, default: str | None, environ: Mapping[str, str], key: str) -> str:
    value = environ.get(name, default)
    if value is None:
        raise ValueError(f"{key}: the environment variable {name} is not set on this machine, and has no default")
    return value
