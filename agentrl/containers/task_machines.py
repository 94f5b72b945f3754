"""What a task's machines are made from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.containers.spec import BuildSpec, Healthcheck, MachineSpec
from agentrl.containers.task_compose import read_compose
from agentrl.containers.task_folder import TaskFolder
from agentrl.containers.task_toml import EnvironmentToml, NetworkPolicy, expand_variables
from agentrl.core.errors import TaskError


async def machine_spec(folder: TaskFolder, step: int | None = None) -> MachineSpec:
    """Return what the agent's machine is made from; with a step, what the machine of its tests is made from.

    Raises:
        TaskError: a variable of this machine that the task refers to is not set, or its services need what machines do not have.
        ConfigError: its ``docker-compose.yaml`` cannot be read.
    """
    if step is None:
        return _spec(folder, folder.config.environment, folder.context, folder.steps[0].network)
    grading = folder.steps[step].grading
    return _spec(folder, grading.environment, grading.context, grading.network)


async def task_images(folder: TaskFolder) -> dict[str, tuple[str | None, BuildSpec | None]]:
    """Return the images of a task's machines and services, as arguments of `Images.ensure`, by a name for messages.

    Raises:
        TaskError: see `machine_spec`.
    """
    specs = {folder.name: await machine_spec(folder)}
    for number, step in enumerate(folder.steps):
        if step.grading.is_separate:
            specs[f"{folder.name} tests {step.name}".rstrip()] = await machine_spec(folder, number)
    images = {name: (spec.image, spec.build) for name, spec in specs.items()}
    for name, spec in specs.items():
        images |= {f"{name} {service.name}": (service.image, service.build) for service in spec.services}
    return {
        name: images[name]
        for name in images
        if name == next(first for first in images if images[first] == images[name])
    }


def _spec(folder: TaskFolder, environment: EnvironmentToml, context: Path, network: NetworkPolicy) -> MachineSpec:
    compose = read_compose(context, os.environ)
    if compose.faults:
        raise TaskError(f"task {folder.name}: {'; '.join(compose.faults)}")
    build = None
    if environment.docker_image is None:
        build = BuildSpec(context=context.resolve(), timeout_s=environment.build_timeout_sec)
    try:
        env: Mapping[str, str] = expand_variables(environment.env, os.environ, "environment.env")
    except ValueError as error:
        raise TaskError(f"task {folder.name}: {error}") from None
    limits: dict[str, Any] = {
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "disk_mb": environment.storage_mb,
    }
    check = environment.healthcheck
    return MachineSpec(
        image=environment.docker_image,
        build=build,
        workdir=environment.workdir,
        env={**compose.env, **env},
        services=compose.services,
        volumes=compose.volumes,
        network=network.mode,
        allowed_hosts=tuple(network.allowed_hosts),
        healthcheck=None
        if check is None
        else Healthcheck(
            command=check.command,
            interval_s=check.interval_sec,
            timeout_s=check.timeout_sec,
            start_period_s=check.start_period_sec,
            start_interval_s=check.start_interval_sec,
            retries=check.retries,
        ),
        **{name: value for name, value in limits.items() if value is not None},
    )
