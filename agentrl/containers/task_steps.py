"""Preparation of a task's steps in the agent's machine."""

from __future__ import annotations

import asyncio
import time

from agentrl.containers.machine import Command, Machine
from agentrl.containers.task_folder import TaskFolder
from agentrl.containers.task_toml import HealthcheckToml
from agentrl.core.errors import TaskError

SETUP = "setup.sh"
SETUP_S = 600.0
"""Wall time of a step's ``setup.sh``, seconds."""


async def prepare_step(folder: TaskFolder, step: int, machine: Machine) -> None:
    """Write a step's files to the working folder, run its ``setup.sh``, and wait until its health check succeeds.

    Raises:
        TaskError: ``setup.sh`` or the health check fails.
        SandboxFailure: the machine is lost.
    """
    task_step = folder.steps[step]
    if task_step.files is not None:
        workdir = (await machine.run(Command("pwd"))).output.strip() or "/"
        await machine.upload(task_step.files, workdir)
        if (task_step.files / SETUP).is_file():
            result = await machine.run(
                Command(("/bin/bash", f"{workdir.rstrip('/')}/{SETUP}"), user=task_step.user, wall_s=SETUP_S)
            )
            if result.exit_code != 0:
                raise TaskError(
                    f"task {folder.name}: {SETUP} of step {task_step.name!r} ended with {result.exit_code}: "
                    f"{result.output[-500:]}"
                )
    if task_step.healthcheck is not None:
        await wait_healthy(folder.name, machine, task_step.healthcheck)


async def wait_healthy(task: str, machine: Machine, check: HealthcheckToml) -> None:
    """Run a health check until it succeeds.

    Raises:
        TaskError: it failed ``retries`` times, one after the other, after its start period.
    """
    began, failures = time.monotonic(), 0
    while True:
        result = await machine.run(Command(check.command, wall_s=check.timeout_sec))
        if result.exit_code == 0:
            return
        in_start_period = time.monotonic() - began < check.start_period_sec
        failures += not in_start_period
        if failures >= check.retries:
            raise TaskError(f"task {task}: its health check {check.command!r} fails: {result.output[-500:]}")
        await asyncio.sleep(check.start_interval_sec if in_start_period else check.interval_sec)
