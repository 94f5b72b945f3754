"""Folders of container tasks in Harbor's format: the files of a task, and its steps with the settings that they have.

A folder has ``task.toml``, ``instruction.md``, ``environment/`` (a ``Dockerfile`` or ``docker-compose.yaml``), ``tests/test.sh``
and ``solution/solve.sh``; a task of several steps has instructions, tests and solutions in ``steps/NAME/``.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path

from agentrl.config.validation import parse_section
from agentrl.containers.task_toml import (
    AgentToml,
    ArtifactToml,
    CollectToml,
    EnvironmentToml,
    HealthcheckToml,
    NetworkPolicy,
    StepToml,
    TaskToml,
    VerifierToml,
    with_artifacts_folder,
)
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading

TASK_TOML = "task.toml"
TESTS = "/tests"
"""Where the tests are in a container."""
SOLUTION = "/solution"
"""Where the reference solution is in a container."""
TEST_SCRIPT = f"{TESTS}/test.sh"
"""What grades; its exit code says nothing."""
SOLVE_SCRIPT = f"{SOLUTION}/solve.sh"
"""The reference solution."""
FOLDER_KEY = "task_folder"
"""The metadata of a task (`agentrl.core.task.Task.metadata`) that name its folder."""
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_DEFINITIONS = ("Dockerfile", "docker-compose.yaml")
_IGNORED = ".harborignore"


@dataclass(frozen=True, slots=True)
class Grading:
    """How the tests of a step run."""

    is_separate: bool
    """In a separate container, which has only the artifacts; else in the agent's, which can forge the reward. Harbor
    shares the agent's unless a task says ``separate``, agentrl only if a task says ``shared``."""
    environment: EnvironmentToml
    """The container of the tests; the agent's if they share it."""
    context: Path
    """Folder with the ``Dockerfile`` or ``docker-compose.yaml`` of that container, which need not exist with an image."""
    tests: tuple[Path, ...]
    """Folders whose files are copied to `TESTS`, one over the other. Empty: the image has the tests."""
    timeout_s: float
    """Seconds that they have."""
    env: Mapping[str, str]
    """Their variables, not yet expanded."""
    user: str | None
    """Their user; None: the image's."""
    network: NetworkPolicy
    """What they reach."""
    collect: tuple[CollectToml, ...]
    """Commands after the agent and before the artifacts are copied."""
    artifacts: tuple[ArtifactToml, ...]
    """What is carried out of the agent's container."""


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One step of a task."""

    name: str
    """Its folder below ``steps/``; empty if the task is one step."""
    instruction: str
    """The instruction of the agent."""
    files: Path | None
    """Folder whose files are copied to the working folder before it. Its ``setup.sh``, if it has one, is then run."""
    solution: Path | None
    """Folder of the reference solution, with ``solve.sh``; it is copied to `SOLUTION`. None: there is none."""
    timeout_s: float | None
    """Seconds that the agent has; None: no limit."""
    user: str | None
    """The agent's user; None: the image's."""
    network: NetworkPolicy
    """What the agent reaches."""
    healthcheck: HealthcheckToml | None
    """Tells when the step may begin, in addition to that of the environment."""
    min_rewards: Mapping[str, float]
    """Least rewards, by name, with which the next step begins."""
    grading: Grading
    """How its tests run."""

    def allows_next(self, rewards: Mapping[str, float]) -> bool:
        """Return whether the next step begins after these rewards."""
        return all(rewards.get(name, float("-inf")) >= least for name, least in self.min_rewards.items())


@dataclass(frozen=True)
class TaskFolder:
    """A task on the disk, read and checked."""

    path: Path
    """The folder."""
    config: TaskToml
    """Its ``task.toml``."""
    steps: tuple[TaskStep, ...]
    """At least one."""

    @property
    def name(self) -> str:
        """The name of the package, else of the folder."""
        return self.config.task.name if self.config.task is not None else self.path.name

    @property
    def context(self) -> Path:
        """Folder with the ``Dockerfile`` or ``docker-compose.yaml`` of the agent's container."""
        return self.path / "environment"

    @property
    def has_compose(self) -> bool:
        """Whether the task has further services."""
        return (self.context / "docker-compose.yaml").is_file()

    @property
    def is_forgeable(self) -> bool:
        """Whether tests of a step run in the agent's container, where it can forge the reward."""
        return not all(step.grading.is_separate for step in self.steps)

    @property
    def instruction(self) -> str:
        """The first message to the agent."""
        return self.steps[0].instruction

    def checksum(self) -> str:
        """Return a hash of all files, their paths and which are programs: 16 hexadecimal digits."""
        digest = hashlib.sha256()
        files = (path for path in self.path.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
        for file in sorted(files):
            mode = "x" if file.stat().st_mode & 0o111 else "-"
            digest.update(f"{file.relative_to(self.path)}\0{mode}{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def reward(self, rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the rewards of the task by name.

        Args:
            rewards: of the steps that were played, in order, at least one.
        """
        if self.config.multi_step_reward_strategy == "final":
            return dict(rewards[-1])
        names = dict.fromkeys(name for step_rewards in rewards for name in step_rewards)
        return {name: sum(values.get(name, 0.0) for values in rewards) / len(rewards) for name in names}


def is_task_folder(path: Path) -> bool:
    """Return whether a folder has a ``task.toml``."""
    return (path / TASK_TOML).is_file()


def find_task_folders(path: Path) -> list[Path]:
    """Return a task's folder itself, or the folders of tasks in a folder, by name; ``[]`` if there are none."""
    if is_task_folder(path):
        return [path]
    return sorted(child for child in path.iterdir() if is_task_folder(child)) if path.is_dir() else []


def load_task_folder(path: Path) -> TaskFolder:
    """Read and check a task.

    Raises:
        ConfigError: a file is missing or cannot be read, or a field is unknown or has a bad value; one line for each fault, with
            the file, and the field in ``task.toml``.
    """
    toml = path / TASK_TOML
    if not toml.is_file():
        raise ConfigError(f"{path} is no folder of a task: it has no {TASK_TOML}")
    with reading(toml, "TOML file"):
        values = tomllib.loads(toml.read_text())
    try:
        config = parse_section(TaskToml, values)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{toml}: {line}" for line in str(error).splitlines())) from None
    _check_trees(path)
    steps = [_read_step(path, config, step) for step in config.steps or (None,)]
    _check_environment(path, config)
    return TaskFolder(path, config, tuple(steps))


def _check_environment(path: Path, config: TaskToml) -> None:
    context = path / "environment"
    if config.environment.docker_image is None and not any((context / name).is_file() for name in _DEFINITIONS):
        raise ConfigError(
            f"{path / TASK_TOML}: environment.docker_image is not set, and there is no {context / 'Dockerfile'} and no "
            "docker-compose.yaml"
        )


def _check_trees(path: Path) -> None:
    """Refuse links that lead out of the task, and rules that are not followed here."""
    root = path.resolve()
    for folder in ("environment", "tests", "solution", "steps"):
        for file in (path / folder, *(path / folder).rglob("*")):
            if file.is_symlink() and not file.resolve().is_relative_to(root):
                raise ConfigError(f"{file}: the link leads out of the task's folder")
            if file.name == _IGNORED:
                raise ConfigError(
                    f"{file}: rules of files to leave out are not followed; remove the files that they name, and it"
                )


def _read_step(path: Path, config: TaskToml, step: StepToml | None) -> TaskStep:
    folder = path if step is None else path / "steps" / step.name
    instruction = folder / "instruction.md"
    with reading(instruction, "text"):
        text = strip_canary(instruction.read_text())
    if not text.strip():
        raise ConfigError(f"{instruction} is empty")
    agent = step.agent if step is not None else AgentToml()
    solutions = [solution for solution in (folder / "solution", path / "solution") if solution.is_dir()]
    if solutions and not (solutions[0] / "solve.sh").is_file():
        raise ConfigError(f"{solutions[0]} has no solve.sh")
    least = step.min_reward if step is not None else None
    files = folder / "workdir"
    return TaskStep(
        name=step.name if step is not None else "",
        instruction=text,
        files=files if step is not None and files.is_dir() else None,
        solution=solutions[0] if solutions else None,
        timeout_s=agent.timeout_sec if agent.timeout_sec is not None else config.agent.timeout_sec,
        user=agent.user if agent.user is not None else config.agent.user,
        network=agent.policy or config.agent.policy or config.environment.policy,
        healthcheck=step.healthcheck if step is not None else None,
        min_rewards=least if isinstance(least, dict) else {} if least is None else {"reward": least},
        grading=_read_grading(path, config, step),
    )


def _read_grading(path: Path, config: TaskToml, step: StepToml | None) -> Grading:
    """Return how the tests of a step run: its own settings before those of the task."""
    own = step.verifier if step is not None else VerifierToml()
    shared = config.verifier
    mode = own.mode or shared.mode
    folders = [path / "tests"] if step is None else [path / "tests", path / "steps" / step.name / "tests"]
    environment, context, in_image = config.environment, path / "environment", False
    if mode == "separate":
        environment = own.environment or shared.environment or config.environment
        sections = [shared.environment, own.environment][: len(folders)]
        for section, folder in reversed(list(zip(sections, folders, strict=True))):
            if section is not None and section.docker_image is not None:
                environment = environment.model_copy(update={"docker_image": section.docker_image})
                context, in_image = folder, True
                break
            if any((folder / name).is_file() for name in _DEFINITIONS):
                environment = environment.model_copy(update={"docker_image": None})
                context, in_image = folder, True
                break
        else:
            environment = environment.model_copy(update={"docker_image": config.environment.docker_image})
    if not in_image and not any((folder / "test.sh").is_file() for folder in folders):
        raise ConfigError(f"{folders[-1] / 'test.sh'}: there is no such file")
    return Grading(
        is_separate=mode != "shared",
        environment=environment,
        context=context,
        tests=() if in_image else tuple(folder for folder in folders if folder.is_dir()),
        timeout_s=own.timeout_sec if "timeout_sec" in own.model_fields_set else shared.timeout_sec,
        env={**shared.env, **own.env},
        user=own.user if own.user is not None else shared.user,
        network=own.policy or shared.policy or environment.policy,
        collect=(*shared.collect, *own.collect),
        artifacts=with_artifacts_folder([*config.artifacts, *(step.artifacts if step is not None else ())]),
    )


def strip_canary(text: str) -> str:
    """Return an instruction without the lines at its begin that mark files of benchmarks (canaries)."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def json_metadata(values: Mapping[str, object]) -> dict[str, object]:
    """Return a table of TOML with dates and times as texts."""
    return {str(key): _json_value(value) for key, value in values.items()}


def _json_value(value: object) -> object:
    if isinstance(value, Mapping):
        return json_metadata(value)
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value
