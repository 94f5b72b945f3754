"""Folders of container tasks as rows: ``data.path`` is the folder of one task, or a folder of such folders."""

from __future__ import annotations

from pathlib import Path

from agentrl.containers.task_folder import FOLDER_KEY, TaskFolder, json_metadata, load_task_folder

ID, PROMPT, METADATA = "id", "prompt", "metadata"
"""Columns of the rows."""


def read_task_folder(path: Path) -> dict[str, object]:
    """Return the row of a task.

    Its id is the folder's name, its prompt the first instruction. The metadata are those of ``task.toml``, with the folder as
    `FOLDER_KEY` and a checksum of its files.

    Raises:
        ConfigError: see `load_task_folder`.
    """
    task = load_task_folder(path.resolve())
    metadata = {**json_metadata(task.config.metadata), FOLDER_KEY: str(task.path), "checksum": task.checksum()}
    return {ID: task.path.name, PROMPT: task.instruction.strip(), METADATA: metadata}


def describe_task(task: TaskFolder) -> list[tuple[str, str]]:
    """Return names and values of the lines with which a task is shown: steps, container, network, limits, and the tests."""
    environment, first = task.config.environment, task.steps[0]
    image = environment.docker_image or f"built from {task.context}"
    limits = {
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb,
        "storage_mb": environment.storage_mb,
        "agent.timeout_sec": first.timeout_s,
    }
    tests = "in the agent's container, which can forge the reward" if task.is_forgeable else "in another container"
    lines = {
        "steps": ", ".join(step.name for step in task.steps),
        "container": image + (", with the services of docker-compose.yaml" if task.has_compose else ""),
        "network": " ".join([first.network.mode, *first.network.allowed_hosts]),
        "limits": ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None),
        "tests": tests,
    }
    return [(name, value) for name, value in lines.items() if value]
