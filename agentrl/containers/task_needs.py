"""What tasks need and a machine of agentrl, or the daemon's host, does not have; known before anything starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config.containers import ContainersConfig
from agentrl.containers.allowlist import is_allowed
from agentrl.containers.task_compose import read_compose
from agentrl.containers.task_folder import FOLDER_KEY, TASK_TOML, TaskFolder, TaskStep, load_task_folder
from agentrl.containers.task_toml import MAIN, EnvironmentToml, McpServerToml, expand_header, expand_variables
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task

MOST_LINES = 20
"""Needs that a message names."""
ANSWERS_WITHIN_S = 5
"""Seconds that a daemon has to say what its host has."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a daemon's host has."""

    cpus: int
    """Cores."""
    memory_mb: int
    """Memory, MiB."""
    os: str = "linux"
    """System of its containers."""


def host_facts(info: Mapping[str, object]) -> HostFacts:
    """Return the facts in the reply of a Docker daemon to ``info``."""
    return HostFacts(int(str(info["NCPU"])), int(str(info["MemTotal"])) // 2**20, str(info.get("OSType", "linux")))


def unmet_needs(task: TaskFolder, host: HostFacts | None, environ: Mapping[str, str]) -> list[str]:
    """Return what a task needs and does not get, a line each with the file and the field.

    Args:
        task: the folder.
        host: of the daemon; None: not known, and not checked.
        environ: variables of this machine.

    Raises:
        ConfigError: its ``docker-compose.yaml`` cannot be read.
    """
    toml = task.path / TASK_TOML
    lines = [*_environment_needs(task.config.environment, host, environ, "environment")]
    if task.config.verifier.environment is not None:
        lines += _environment_needs(task.config.verifier.environment, host, environ, "verifier.environment")
    lines += _variable_needs(task.config.solution.env, environ, "solution.env")
    lines += _mcp_needs(task, environ)
    for number, step in enumerate(task.steps):
        prefix = f"steps.{number}." if step.name else ""
        lines += (f"{prefix}{line}" for line in _step_needs(task, step, environ))
    contexts = dict.fromkeys([task.context, *(step.grading.context for step in task.steps if step.grading.is_separate)])
    faults = [fault for context in contexts for fault in read_compose(context, environ).faults]
    return [f"{toml}: {line}" for line in dict.fromkeys(lines)] + faults


def check_task_folders(tasks: Iterable[Task], config: ContainersConfig) -> None:
    """Check that machines have what the folders of tasks need. Tasks without a folder are passed over.

    Args:
        tasks: of a run.
        config: names the daemons, whose hosts must all have it; what a daemon that does not answer has is not checked.

    Raises:
        ConfigError: a folder cannot be read, or needs something else; a line each.
    """
    names = dict.fromkeys(str(task.metadata[FOLDER_KEY]) for task in tasks if FOLDER_KEY in task.metadata)
    if not names:
        return
    host = _read_host(config)
    lines = [line for name in names for line in unmet_needs(load_task_folder(Path(name)), host, os.environ)]
    if lines:
        more = [f"… and {len(lines) - MOST_LINES:,} more"] if len(lines) > MOST_LINES else []
        raise ConfigError("\n".join([*lines[:MOST_LINES], *more]))


def _read_host(config: ContainersConfig) -> HostFacts | None:
    """Return what all daemons' hosts have; None if one does not answer, or the Docker SDK is not installed."""
    try:
        import docker
        import docker.errors
    except ImportError:
        return None
    hosts = []
    for url in config.hosts or (os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock",):
        try:
            client = docker.APIClient(base_url=url, timeout=ANSWERS_WITHIN_S)
            with contextlib.closing(client):
                hosts.append(host_facts(client.info()))
        except (docker.errors.DockerException, OSError):
            return None
    return HostFacts(min(host.cpus for host in hosts), min(host.memory_mb for host in hosts), hosts[0].os)


def _environment_needs(
    environment: EnvironmentToml, host: HostFacts | None, environ: Mapping[str, str], key: str
) -> Iterator[str]:
    if environment.gpus:
        yield f"{key}.gpus={environment.gpus}: machines have no GPUs"
    if environment.tpu is not None:
        yield f"{key}.tpu: machines have no TPUs"
    if environment.mcp_servers and importlib.util.find_spec("mcp") is None:
        yield f'{key}.mcp_servers: the package mcp is not installed (pip install "agentrl-framework[mcp]")'
    if environment.os != "linux":
        yield f"{key}.os={environment.os}: machines are Linux containers"
    elif host is not None and host.os != "linux":
        yield f"{key}.os=linux: the daemon's containers are of {host.os}"
    if host is not None and environment.cpus is not None and environment.cpus > host.cpus:
        yield f"{key}.cpus={environment.cpus:g}: the daemon's host has {host.cpus}"
    if host is not None and environment.memory_mb is not None and environment.memory_mb > host.memory_mb:
        yield f"{key}.memory_mb={environment.memory_mb}: the daemon's host has {host.memory_mb}"
    yield from _variable_needs(environment.env, environ, f"{key}.env")
    for server in environment.mcp_servers:
        for name, value in server.headers.items():
            try:
                expand_header(value, environ, f"{key}.mcp_servers.{server.name}.headers.{name}")
            except ValueError as error:
                yield str(error)


def _variable_needs(values: Mapping[str, str], environ: Mapping[str, str], key: str) -> Iterator[str]:
    for name, value in values.items():
        try:
            expand_variables({name: value}, environ, key)
        except ValueError as error:
            yield str(error)


def _step_needs(task: TaskFolder, step: TaskStep, environ: Mapping[str, str]) -> Iterator[str]:
    grading = step.grading
    if step.network != task.steps[0].network:
        yield f"agent.network_mode={step.network.mode}: the machine has the network of the first step for all steps"
    if not grading.is_separate and grading.network != step.network:
        yield f"verifier.network_mode={grading.network.mode}: tests in the agent's machine have its network"
    services = {hook.service for hook in grading.collect} | {artifact.service for artifact in grading.artifacts}
    services -= {None, MAIN, *(service.name for service in read_compose(task.context, environ).services)}
    if services:
        names = ", ".join(sorted(str(service) for service in services))
        yield f"artifacts and verifier.collect name {names}, which environment/docker-compose.yaml does not have"
    yield from _variable_needs(grading.env, environ, "verifier.env")


def _mcp_needs(task: TaskFolder, environ: Mapping[str, str]) -> Iterator[str]:
    """Return the MCP servers that the agent's machine would not reach."""
    names = {service.name for service in read_compose(task.context, environ).services}
    network = task.steps[0].network
    for server in task.config.environment.mcp_servers:
        host = urlsplit(server.url or "").hostname or ""
        if is_inside(server, names) or network.mode == "public":
            continue
        if network.mode == "no-network" or not is_allowed(host, network.allowed_hosts):
            yield f"environment.mcp_servers.{server.name}.url={server.url}: network_mode={network.mode} does not reach it"


def is_inside(server: McpServerToml, services: Container[str]) -> bool:
    """Return whether an MCP server is a program in the machine, or listens there or in one of its services."""
    host = urlsplit(server.url or "").hostname or ""
    return server.transport == "stdio" or host in ("localhost", "127.0.0.1", "::1") or host in services
