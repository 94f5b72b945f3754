"""Tasks of a taskset of verifiers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from agentrl.adapters.verifiers.process import VerifiersError, verifiers_process
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.task import Task
from agentrl.core.types import Message

KEY = "env.options"
FACTS = "verifiers"
"""Key of `Task.metadata` with what an episode needs: `EpisodeFacts` as a mapping."""


class EpisodeFacts(msgspec.Struct, frozen=True):
    """Where an episode's task is."""

    python: str
    config: dict[str, object]
    """The environment's configuration, verifiers' block ``env``."""
    index: int
    """Index of the task in the taskset."""
    size: int
    """Tasks that are read of the taskset."""


class _ListedTask(msgspec.Struct):
    name: str
    prompt: str


@dataclass(frozen=True, slots=True)
class VerifiersOptions:
    """Which environment; the keyword arguments of `VerifiersEnv`."""

    id: str
    """A taskset: the name of its installed package or module, or ``FILE.py``."""
    config: Mapping[str, object] = field(default_factory=dict)
    """The environment's configuration, verifiers' block ``env``: ``id``, ``taskset``, ``agent``, ``timeout``, … Programs of
    agents run in ``agent.runtime.type=subprocess`` if it does not say where."""
    eval_config: Mapping[str, object] | None = None
    """The configuration in evaluations; None: ``config``, and tasks that training does not have."""
    python: str = sys.executable
    """The interpreter of the environment that has verifiers."""
    size: int = 1000
    """Tasks to train on, at most."""
    eval_size: int = 100
    """Tasks to evaluate on, at most."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of range.
        """
        for name in ("size", "eval_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{KEY}.{name}={getattr(self, name)} must be at least 1")

    def env_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return a configuration with the taskset's id.

        Raises:
            ConfigError: its section ``taskset`` is no mapping.
        """
        taskset = config.get("taskset", {})
        if not isinstance(taskset, Mapping):
            raise ConfigError(f"{KEY}.config.taskset={taskset!r:.100} must be a mapping")
        own_id = str(Path(self.id).resolve()) if self.id.endswith(".py") else self.id
        return {**config, "taskset": {**taskset, "id": own_id}}


def list_tasks(options: VerifiersOptions, split: str) -> Sequence[Task]:
    """Return the tasks of a split, ``train`` or ``eval``.

    Without ``eval_config`` the first ``eval_size`` tasks of the taskset, half of it at most, are those to evaluate on.

    Raises:
        ConfigError, UnknownNameError: there is no such split or taskset, or verifiers refuses the configuration.
    """
    if split not in ("train", "eval"):
        raise unknown_name("split of verifiers", split, ("train", "eval"), "tasks.train_split, tasks.eval_split")
    shared = options.eval_config is None
    config = options.config if split == "train" or options.eval_config is None else options.eval_config
    size = options.eval_size + options.size if shared else options.size if split == "train" else options.eval_size
    env_config = options.env_config(config)
    _, value = verifiers_process(options.python).call("list_tasks", config=env_config, size=size)
    try:
        tasks = msgspec.convert(value.result(), list[_ListedTask])
    except VerifiersError as error:
        raise ConfigError(f"{KEY}.id={options.id}: {error}") from error
    border = min(options.eval_size, len(tasks) // 2) if shared else 0
    indices = range(len(tasks)) if not shared else range(border, len(tasks)) if split == "train" else range(border)
    return [
        Task(
            f"verifiers/{split}/{index}",
            (Message("user", tasks[index].prompt),),
            metadata={
                "name": tasks[index].name,
                FACTS: msgspec.to_builtins(EpisodeFacts(options.python, env_config, index, size)),
            },
        )
        for index in indices
    ]
