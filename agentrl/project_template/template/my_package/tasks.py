"""The tasks: questions about invented people, and the directory that holds the answers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from agentrl import Message, Task, TaskSet, unknown_name

Facts = dict[str, str]
"""What is true of a person: ``{"birthplace": "Sadova", "employer": "Kelocorp", "spouse": "Tamo Rilek"}``."""


def make_directory(rng: Random, pairs: int) -> dict[str, Facts]:
    """Return the facts of ``2 * pairs`` people by name; each is married to the next or to the one before."""
    names: dict[str, None] = {}
    while len(names) < 2 * pairs:
        names[f"{_word(rng)} {_word(rng)}"] = None
    people = list(names)
    return {
        name: {
            "birthplace": _word(rng) + rng.choice(("burg", "ton", "ville", "ford")),
            "employer": _word(rng) + rng.choice(("corp", "works", "tex")),
            "spouse": people[index ^ 1],
        }
        for index, name in enumerate(people)
    }


def _word(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2)).capitalize()


DIRECTORIES = {"train": make_directory(Random("train"), 200), "eval": make_directory(Random("eval"), 50)}
"""The people asked about in training, and others for evaluation."""


class People(TaskSet):
    """Asks "What is the employer of Tamo Rilek?", and "… of the spouse of Tamo Rilek?", which takes two lookups."""

    def split(self, name: str) -> Sequence[Task]:
        """Return all questions about the people of ``train`` or ``eval``, in a fixed random order."""
        if name not in DIRECTORIES:
            raise unknown_name("split", name, DIRECTORIES, "tasks.train_split or tasks.eval_split")
        tasks = [
            task
            for person, facts in DIRECTORIES[name].items()
            for fact in ("birthplace", "employer")
            for task in (
                _task(name, f"the {fact} of {person}", facts[fact], 1),
                _task(name, f"the {fact} of the spouse of {person}", DIRECTORIES[name][facts["spouse"]][fact], 2),
            )
        ]
        Random(name).shuffle(tasks)
        return tasks


def _task(split: str, subject: str, answer: str, lookups: int) -> Task:
    # The id names the group of episodes whose rewards are compared; metrics can be reported by metadata.
    return Task(
        f"my_project/{split}/{subject}", (Message("user", f"What is {subject}?"),), answer, {"lookups": lookups}
    )
