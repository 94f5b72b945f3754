"""Tasks of reasoning-gym: entries of one dataset or of a composite, made on access by their seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from typing_extensions import override

from agentrl.adapters.reasoning_gym.library import Entry, makers
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.task import MadeTasks, Task
from agentrl.core.types import Message

KEY = "env.options"
EVAL_SEEDS = 2**31
"""What the seed of evaluation adds to that of training: no entry has the seed of another one."""
_MOST_SEEDS = 2**30
_DERIVED = ("seed", "size")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """One dataset of a composite. Example: ``DatasetOptions("chain_sum", 2.0, {"max_terms": 4})``."""

    name: str
    """A dataset of reasoning-gym."""
    weight: float = 1.0
    """Its share of the entries is its weight by the sum of all."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of the dataset, such as ``{"min_terms": 2}``."""
    level: int | None = None
    """Level of its curriculum, from 0; None: the dataset's defaults."""


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Which entries, and how they are asked for; the keyword arguments of `ReasoningGymEnv`."""

    dataset: str | None = None
    """A dataset of reasoning-gym; None: those of ``datasets``, and without these all of them with equal weights."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``dataset``."""
    level: int | None = None
    """Level of the curricula of ``dataset``, or of all; None: the datasets' defaults."""
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """A composite: by dataset, ``weight``, ``config`` and ``level``."""
    size: int = 5000
    """Tasks of the split ``train``."""
    eval_size: int = 200
    """Tasks of the split ``eval``."""
    seed: int = 0
    """Decides about the entries."""
    system_prompt: str | None = "default"
    """A system prompt of reasoning-gym by name, or a text; None: none."""
    answer: str = "tags"
    """``tags``: the answer is in the last ``<answer>`` tags; ``text``: it is the whole turn after the reasoning."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: one is out of range.
        """
        if self.dataset is not None and self.datasets:
            raise ConfigError(f"{KEY}.dataset={self.dataset} and {KEY}.datasets both name datasets; leave out one")
        if self.dataset is None and self.config:
            raise ConfigError(f"{KEY}.config is of {KEY}.dataset, which is not set; see {KEY}.datasets.NAME.config")
        for name in ("size", "eval_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{KEY}.{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.seed < _MOST_SEEDS:
            raise ConfigError(f"{KEY}.seed={self.seed} must be at least 0 and less than {_MOST_SEEDS}")
        if self.answer not in ("tags", "text"):
            raise ConfigError(f"{KEY}.answer={self.answer} must be tags or text")
        self.sources()

    def sources(self) -> tuple[DatasetOptions, ...]:
        """Return the datasets; empty: all.

        Raises:
            ConfigError: an entry of `datasets` has another key, or a value that is out of range.
        """
        if self.dataset is not None:
            sources = [(f"{KEY}.config", DatasetOptions(self.dataset, 1.0, self.config, self.level))]
        else:
            sources = []
            for name, options in self.datasets.items():
                key = f"{KEY}.datasets.{name}"
                if not isinstance(options, Mapping) or not set(options) <= {"weight", "config", "level"}:
                    raise ConfigError(f"{key}={options!r:.100} must be a mapping with weight, config and level")
                source = DatasetOptions(name, **{"level": self.level, **options})
                if not source.weight > 0:
                    raise ConfigError(f"{key}.weight={source.weight} must be above 0")
                sources.append((f"{key}.config", source))
        for key, source in sources:
            if derived := [name for name in _DERIVED if name in source.config]:
                raise ConfigError(f"{key}.{derived[0]} is derived; set {KEY}.{derived[0]}")
        return tuple(source for _, source in sources)


class ReasoningGymTasks(MadeTasks):
    """The tasks of a split. Those of one dataset are the entries of ``create_dataset(name, seed=…, size=…, **config)``.

    Args:
        split: the split's name.
        options: of the environment.
        sources: its datasets, at least one.
        prompt: the system prompt, or nothing.
    """

    def __init__(self, split: str, options: TaskOptions, sources: tuple[DatasetOptions, ...], prompt: str) -> None:
        super().__init__(split, options.eval_size if split == "eval" else options.size)
        self.sources = sources
        """The datasets, with their levels."""
        self._options, self._prompt = options, prompt
        self._seed = options.seed + (EVAL_SEEDS if split == "eval" else 0)
        self._spec = self._make_spec()

    def at_levels(self, levels: Mapping[str, int]) -> Self:
        """Return the tasks with other levels of curricula, by dataset."""
        tasks = copy(self)
        tasks.sources = tuple(
            DatasetOptions(source.name, source.weight, source.config, levels.get(source.name, source.level))
            for source in self.sources
        )
        tasks._spec = tasks._make_spec()
        return tasks

    def _make_spec(self) -> str:
        datasets = [asdict(source) for source in self.sources]
        if len(datasets) == 1:
            datasets[0]["config"] = {**datasets[0]["config"], "seed": self._seed}
        return json.dumps({"size": len(self), "seed": self._seed, "datasets": datasets})

    def check(self) -> None:
        """Check that the datasets can be made.

        Raises:
            ConfigError: reasoning-gym refuses an option.
        """
        makers().call(type(None), "check_entries", spec=self._spec)

    @override
    def make(self, index: int) -> Task:
        entry = makers().call(Entry, "make_entry", spec=self._spec, index=index)
        (source,) = (source for source in self.sources if source.name == entry.dataset)
        level = "" if source.level is None else f"level-{source.level}/"
        system = (Message("system", self._prompt),) if self._prompt else ()
        return Task(
            f"reasoning_gym/{self.split}/{source.name}/{level}{index}",
            (*system, Message("user", entry.question)),
            answer=entry.answer,
            metadata={
                "dataset": source.name,
                "config": dict(source.config),
                "level": source.level,
                "entry": entry.entry,
            },
        )


def open_split(options: TaskOptions, split: str) -> ReasoningGymTasks:
    """Return the tasks of a split, ``train`` or ``eval``, whose entries have different seeds.

    Raises:
        ConfigError, UnknownNameError: there is no such split or dataset, or reasoning-gym refuses an option.
        MissingError: it is not installed.
    """
    if split not in ("train", "eval"):
        raise unknown_name("split of reasoning_gym", split, ("train", "eval"), "tasks.train_split, tasks.eval_split")
    names = makers().call(list[str], "list_datasets")
    for source in options.sources():
        if source.name not in names:
            key = f"{KEY}.dataset" if options.dataset is not None else f"{KEY}.datasets"
            raise unknown_name("dataset of reasoning-gym", source.name, names, key)
    sources = options.sources() or tuple(DatasetOptions(name, level=options.level) for name in names)
    prompts = makers().call(dict[str, str], "list_prompts")
    prompt = prompts.get(options.system_prompt or "", options.system_prompt or "")
    tasks = ReasoningGymTasks(split, options, sources, prompt)
    tasks.check()
    return tasks
