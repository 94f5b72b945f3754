"""The taskset: pictures of generated scenes with questions."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from agentrl import ConfigError, MadeTasks, Task, TaskSet, unknown_name
from agentrl.core.types import message_with_images
from agentrl_tasks.faults import check_faults, draw_fault

from .demonstrator import FAULTS, Expert
from .questions import DESCRIBE, KINDS, Question, describe
from .scene import Scene, draw_scene, encode_png

SPLITS = ("train", "eval")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question about a scene."""

    question: Question
    """What is asked."""
    scene: Scene
    """What the picture shows."""
    answer: str
    """The answer; with ``shuffle_pictures`` that of another picture."""


def is_held_out(scene: Scene) -> bool:
    """Return whether a scene belongs to ``eval`` (one in five) or to ``train``."""
    return zlib.crc32(repr(scene).encode()) % 5 == 0


class Pictures(MadeTasks):
    """The tasks of a split, each drawn from a separate seed on access."""

    def __init__(self, split: str, size: int, seed: int, kinds: Sequence[str], shuffle_pictures: bool) -> None:
        """See `Geometry` for the arguments."""
        super().__init__(split, size)
        self._seed, self._kinds, self._shuffle_pictures = seed, tuple(kinds), shuffle_pictures

    def problem(self, index: int) -> Problem:
        """Return question, scene and answer of a task."""
        name = self._kinds[index % len(self._kinds)]
        rng = Random(f"geometry/{name}/{self._seed}/{self.split}/{index}")
        kind = KINDS[rng.choice([*KINDS]) if name == DESCRIBE else name]
        question = kind.ask(rng)
        answers = kind.answers(question)
        answer = rng.choice(answers)
        shown_answer = rng.choice(answers) if self._shuffle_pictures else answer
        while True:
            scene = kind.draw(rng, question, shown_answer)
            if is_held_out(scene) == (self.split == "eval"):
                break
        if name == DESCRIBE:
            return Problem(Question(DESCRIBE, "What is in the picture?", ()), scene, describe(scene))
        return Problem(question, scene, answer)

    def make(self, index: int) -> Task:
        """Return task ``index``."""
        problem = self.problem(index)
        picture = encode_png(draw_scene(problem.scene))
        return Task(
            id=f"geometry/{self.split}/{index}",
            prompt=(message_with_images("user", picture, problem.question.text),),
            answer=problem.answer,
            metadata={"kind": problem.question.kind, "index": index, "split": self.split},
        )


class Geometry(TaskSet):
    """Questions about pictures of 256 pixels a side, for the environment ``geometry``. Splits: ``train`` and ``eval``.

    No picture is in both. All answers of a question are equally frequent, so that its text says nothing about its answer.
    """

    def __init__(  # the keys of tasks.options
        self,
        kinds: Sequence[str] = tuple(KINDS),
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
        shuffle_pictures: bool = False,
        faults: Mapping[str, float] | None = None,
    ) -> None:
        """Choose the pictures.

        Args:
            kinds: kinds of questions, which alternate; see `KINDS` and `DESCRIBE`.
            seed: draws the pictures of ``train``; those of ``eval`` do not depend on it.
            train_size: pictures in ``train``.
            eval_size: pictures in ``eval``.
            shuffle_pictures: a control experiment: each task has the picture of another task with the same question, so that
                nothing can be learned but to guess.
            faults: probability of each of `FAULTS` in a demonstration; the others are without fault.

        Raises:
            ConfigError: an option is out of range.
            UnknownNameError: a kind or fault is unknown.
        """
        if not kinds:
            raise ConfigError(f"tasks.options.kinds is empty: name some of {', '.join(KINDS)}")
        for name in kinds:
            if name not in (*KINDS, DESCRIBE):
                raise unknown_name("kind", name, (*KINDS, DESCRIBE), "tasks.options.kinds")
        for key, size in (("train_size", train_size), ("eval_size", eval_size)):
            if size < 1:
                raise ConfigError(f"tasks.options.{key}={size} must be at least 1")
        self._kinds, self._seed, self._shuffle_pictures = tuple(kinds), seed, shuffle_pictures
        self._sizes = {"train": train_size, "eval": eval_size}
        self._faults = dict(faults or {})
        check_faults(self._faults, FAULTS)

    def split(self, name: str) -> Pictures:
        """Return the tasks of ``train`` or ``eval``."""
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS, "tasks.train_split, tasks.eval_split")
        seed = self._seed if name == "train" else 0
        return Pictures(name, self._sizes[name], seed, self._kinds, self._shuffle_pictures)

    def problem(self, task: Task) -> Problem:
        """Return question, scene and answer of a task."""
        return self.split(task.metadata["split"]).problem(task.metadata["index"])

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Expert:
        """Return an expert for a task, with a fault drawn by the option ``faults``."""
        problem = self.problem(task)
        return Expert(problem.question, problem.scene, problem.answer, draw_fault(self._faults, rng), rng)
