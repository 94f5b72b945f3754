"""The taskset: questions of one, two and three hops over a training world and a held-out world."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from random import Random

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, unknown_name
from agentrl_tasks.faults import check_faults, draw_fault

from .demonstrator import FAULTS, Expert
from .world import Question, World


@lru_cache(maxsize=4)
def _make_world(seed: int, held_out: bool, scale: float) -> World:
    """Return a world. Tasksets with equal options share it: nothing changes it, and generating it takes a tenth of a second."""
    return World(seed, held_out=held_out, scale=scale)


class Questions(MadeTasks):
    """The tasks of a split, each generated from a separate seed on access."""

    def __init__(self, world: World, split: str, size: int, hops: Sequence[int]) -> None:
        """Draw questions about ``world``; task ``i`` has ``hops[i % len(hops)]`` hops."""
        super().__init__(split, size)
        self._world = world
        self._hops = tuple(hops)

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        hops = self._hops[index % len(self._hops)]
        question = self._world.question(Random(f"{self._world.seed}/{self.split}/{index}"), hops)
        return Task(
            id=f"multihop/{self.split}/{index}",
            prompt=(Message("user", question.text),),
            answer=[question.answer],
            metadata={
                "hops": hops,
                "corpus": "heldout" if self._world.held_out else "train",
                "relations": list(question.relations),
                "path": list(question.path),
            },
        )


class Multihop(TaskSet):
    """Questions such as "What is the mayor of the birthplace of Tamo Rilek?", answered by searching.

    Splits: ``train``, and ``validation`` over the same world; ``eval`` over held-out entities, whose names share no word
    with any training world. Corpora: ``train`` and ``heldout``, named in a task's metadata, so that training
    cannot retrieve a held-out entity.
    """

    def __init__(
        self,
        seed: int = 0,
        eval_seed: int = 0,
        scale: float = 1.0,
        hops: Sequence[int] = (1, 2, 3),
        train_size: int = 100_000,
        eval_size: int = 384,
        shuffle_titles: bool = False,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the worlds, which are generated on first use.

        Args:
            seed: draws the training world and its questions.
            eval_seed: draws the held-out world and its questions.
            scale: size of both worlds; 1 has 980 documents.
            hops: numbers of hops, which alternate among the tasks of a split.
            train_size: questions in ``train``.
            eval_size: questions in ``eval`` and in ``validation``.
            shuffle_titles: a control experiment: texts are shuffled among the titles of documents, answers stay.
            faults: probability of each of `FAULTS` in a demonstration; the others are without fault.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a fault is unknown.
        """
        self._faults = dict(faults or {})
        self._check(hops, scale, train_size, eval_size)
        self._seed, self._eval_seed, self._scale = seed, eval_seed, scale
        self._hops = tuple(hops)
        self._train_size, self._eval_size = train_size, eval_size
        self._shuffle_titles = shuffle_titles

    @cached_property
    def train_world(self) -> World:
        """The world of ``train`` and ``validation``."""
        return _make_world(self._seed, False, self._scale)

    @cached_property
    def held_out_world(self) -> World:
        """The world of ``eval``."""
        return _make_world(self._eval_seed, True, self._scale)

    def split(self, name: str) -> Sequence[Task]:
        """Return the tasks of ``train``, ``validation`` or ``eval``."""
        if name == "train":
            return Questions(self.train_world, name, self._train_size, self._hops)
        if name == "validation":
            return Questions(self.train_world, name, self._eval_size, self._hops)
        if name == "eval":
            return Questions(self.held_out_world, name, self._eval_size, self._hops)
        raise unknown_name("split", name, ("train", "validation", "eval"), "tasks.split")

    def corpora(self) -> Mapping[str, Iterable[Mapping[str, str]]]:
        """Return the documents of both worlds."""
        return {"train": self._rows(self.train_world), "heldout": self._rows(self.held_out_world)}

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Expert:
        """Return an expert for ``task`` with a fault drawn by the option ``faults``."""
        world = self.held_out_world if task.metadata["corpus"] == "heldout" else self.train_world
        question = Question(tuple(task.metadata["relations"]), tuple(task.metadata["path"]))
        return Expert(world, question, draw_fault(self._faults, rng), rng)

    def _rows(self, world: World) -> list[dict[str, str]]:
        documents = world.shuffled_documents() if self._shuffle_titles else world.documents
        return [{"id": str(i), "contents": f'"{d.title}"\n{d.text}'} for i, d in enumerate(documents)]

    def _check(self, hops: Sequence[int], scale: float, train_size: int, eval_size: int) -> None:
        check_faults(self._faults, FAULTS)
        if not hops or not set(hops) <= {1, 2, 3}:
            raise ConfigError(f"tasks.options.hops={list(hops)}: name some of 1, 2 and 3")
        if scale <= 0 or train_size < 1 or eval_size < 1:
            raise ConfigError(f"tasks.options: {scale=}, {train_size=} and {eval_size=} must be greater than 0")
