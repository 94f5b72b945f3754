"""Demonstrations of the task, for the warm start of a language model that does not know its tags."""

from collections.abc import Sequence
from random import Random

import numpy as np
from make_pages import TRAILS, make_row

from agentrl import MadeTasks, Message, Task, TaskSet


class Questions(MadeTasks):
    """Questions about names that are drawn from ``seed``."""

    def __init__(self, split: str, size: int, seed: int) -> None:
        super().__init__(split, size)
        self.seed = seed

    def make(self, index: int) -> Task:
        """Return question ``index``."""
        links = TRAILS[index % len(TRAILS)]
        row = make_row(Random(f"{self.seed}/{self.split}/{index}"), links)
        metadata = {"pages": row["facts"]["pages"], "links": list(links)}
        return Task(
            f"pages/{self.split}/{index}", (Message("user", row["prompt"]),), answer=row["answer"], metadata=metadata
        )


class Expert:
    """Searches for each name and answers; an expert in a hurry answers with the first thing that it reads.

    Args:
        task: the question.
        pages: how many pages it looks up.
    """

    def __init__(self, task: Task, pages: int) -> None:
        names = [*task.metadata["pages"], task.answer]
        links = task.metadata["links"]
        searches = zip(links[:pages], names, strict=False)
        self.turns = [f"<think> {link} </think><search> {name} </search>" for link, name in searches]
        self.turns.append(f"<think> answer </think><answer> {names[pages]} </answer>")

    def act(self, observation: Sequence[Message]) -> str:
        """Return the next turn. What it reads is known, since the pages are the task's."""
        return self.turns.pop(0)


class Pages(TaskSet):
    """Questions about pages, which an expert answers.

    Args:
        seed: draws the names.
        hurried: share of the demonstrations that answer after the first page, most of them wrongly: the warm start knows the
            tags, and reinforcement learning has something to improve.
    """

    def __init__(self, seed: int = 0, hurried: float = 0.7) -> None:
        self.seed = seed
        self.hurried = hurried

    def split(self, name: str) -> Sequence[Task]:
        """Return the questions of a split."""
        return Questions(name, 10_000, self.seed)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> Expert:
        """Return the expert of one demonstration."""
        return Expert(task, 1 if rng.random() < self.hurried else 2)
