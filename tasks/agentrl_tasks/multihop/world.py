"""A generated world: invented people, cities, works, companies and regions, and facts about them.

Every word of a name is invented, and a hash decides for each stem whether it belongs to training or is held out. So no
word of a held-out name occurs in any training world, whatever its seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Kind = Literal["person", "city", "work", "company", "region"]

_CODAS = ("", "", "", "n", "r", "l", "s")
SYLLABLES = tuple(
    consonant + vowel + _CODAS[(3 * i + 5 * j) % len(_CODAS)]
    for i, consonant in enumerate("bdfgklmnprstvz")
    for j, vowel in enumerate("aeiou")
) + tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeo")

ENDINGS: dict[Kind, tuple[str, ...]] = {
    "city": ("burg", "ton", "ville", "ford"),
    "work": ("saga", "song", "iad"),
    "company": ("corp", "works", "tex"),
    "region": ("land", "shire", "mark"),
}
"""Endings of names by kind; people have a first and a last name instead."""

COUNTS: dict[Kind, int] = {"person": 400, "city": 150, "work": 300, "company": 100, "region": 30}
"""Entities of each kind in a world of scale 1: 980, and as many documents."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that every entity of ``subject`` kind has, such as a birthplace."""

    subject: Kind
    """Kind of the entities that have it."""
    object: Kind
    """Kind of its values."""
    clauses: tuple[str, ...]
    """Phrases of documents; ``{}`` is the object's name."""


RELATIONS: dict[str, Relation] = {
    "birthplace": Relation("person", "city", ("was born in {}", "is a native of {}")),
    "spouse": Relation("person", "person", ("is married to {}", "shares a home with {}")),
    "employer": Relation("person", "company", ("works for {}", "is employed by {}")),
    "mayor": Relation("city", "person", ("is governed by {}", "elected {}")),
    "region": Relation("city", "region", ("lies in {}", "is a town in {}")),
    "author": Relation("work", "person", ("was written by {}", "is a novel by {}")),
    "publisher": Relation("work", "company", ("was published by {}", "was printed by {}")),
    "founder": Relation("company", "person", ("was founded by {}", "was started by {}")),
    "seat": Relation("company", "city", ("is based in {}", "has its seat in {}")),
}
"""Relations by the noun that questions use."""

RELATIONS_OF: dict[Kind, tuple[str, ...]] = {
    kind: tuple(name for name, relation in RELATIONS.items() if relation.subject == kind) for kind in COUNTS
}
"""Relations that start at an entity of a kind; none at a region, so a path ends there."""


@dataclass(frozen=True, slots=True)
class Document:
    """One page about one entity."""

    title: str
    """The entity's name."""
    text: str
    """All facts about it, in one sentence."""


@dataclass(frozen=True, slots=True)
class Question:
    """A chain of relations from an entity to the answer. Example: the mayor of the birthplace of Tamo Rilek."""

    relations: tuple[str, ...]
    """In order of look-up: birthplace, mayor."""
    path: tuple[str, ...]
    """Names along the chain, one more than relations: from the question's entity to the answer."""

    @property
    def text(self) -> str:
        """Text of the question."""
        chain = " of ".join(f"the {name}" for name in reversed(self.relations))
        return f"What is {chain} of {self.path[0]}?"

    @property
    def answer(self) -> str:
        """The only right answer."""
        return self.path[-1]


def is_held_out(stem: str) -> bool:
    """Return whether names built on ``stem`` belong to held-out worlds (one in five) or to training worlds."""
    return zlib.crc32(stem.lower().encode()) % 5 == 0


@dataclass(slots=True)
class World:
    """Entities, facts and documents. Equal arguments give equal worlds in every process."""

    seed: int
    """Draws names and facts."""
    held_out: bool
    """Whether names are made of held-out words."""
    scale: float = 1.0
    """Size; 1 has 980 documents."""
    entities: dict[Kind, list[str]] = field(init=False)
    """Names by kind."""
    kinds: dict[str, Kind] = field(init=False)
    """The kind of each name."""
    facts: dict[tuple[str, str], str] = field(init=False)
    """``(name, relation) -> name``."""
    documents: list[Document] = field(init=False)
    """One per entity."""

    def __post_init__(self) -> None:
        """Generate names, facts and documents."""
        rng = Random(f"multihop/{self.seed}/{'held-out' if self.held_out else 'train'}")
        self.entities = self._make_names(rng)
        self.kinds = {name: kind for kind, names in self.entities.items() for name in names}
        self.facts = {}
        for name, kind in self.kinds.items():
            for relation in RELATIONS_OF[kind]:
                candidates = self.entities[RELATIONS[relation].object]
                value = rng.choice(candidates)
                while value == name:
                    value = rng.choice(candidates)
                self.facts[name, relation] = value
        self.documents = [Document(name, self._describe(rng, name, name)) for name in self.kinds]

    def shuffled_documents(self) -> list[Document]:
        """Return the documents with their texts shuffled among the titles of a kind; no title keeps its text.

        A policy that reads its answers in the documents is wrong on these; a policy that knows them by heart is not.
        """
        rng = Random(f"multihop/{self.seed}/mismatched")
        documents = []
        for names in self.entities.values():
            order = rng.sample(names, len(names))
            source_by_name = dict(zip(order, order[1:] + order[:1], strict=True))
            documents += [Document(name, self._describe(rng, name, source_by_name[name])) for name in names]
        return documents

    def question(self, rng: Random, hops: int) -> Question:
        """Draw a question of ``hops`` relations whose path visits no entity twice."""
        while True:
            path = [rng.choice(self.entities[rng.choice(("person", "city", "work", "company"))])]
            relations: list[str] = []
            while len(relations) < hops and (choices := RELATIONS_OF[self.kinds[path[-1]]]):
                relations.append(rng.choice(choices))
                path.append(self.facts[path[-1], relations[-1]])
            if len(relations) == hops and len(set(path)) == len(path):
                return Question(tuple(relations), tuple(path))

    def _make_names(self, rng: Random) -> dict[Kind, list[str]]:
        counts = {kind: max(8, round(count * self.scale)) for kind, count in COUNTS.items()}
        people = counts["person"]
        # Few first and last names for many people: a search for one of the words finds other people too.
        first = self._words(rng, max(10, people // 6), syllables=(2,))
        last = self._words(rng, max(10, people // 3), syllables=(2,))
        pairs = [f"{a} {b}" for a in first for b in last]
        names: dict[Kind, list[str]] = {"person": rng.sample(pairs, people)}
        for kind, endings in ENDINGS.items():
            names[kind] = self._words(rng, counts[kind], syllables=(2, 3), endings=endings)
        return names

    def _words(self, rng: Random, count: int, syllables: Sequence[int], endings: Sequence[str] = ("",)) -> list[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            stem = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice(syllables)))
            if is_held_out(stem) == self.held_out:
                words[stem.capitalize() + rng.choice(endings)] = None
        return list(words)

    def _describe(self, rng: Random, name: str, facts_of: str) -> str:
        relations = list(RELATIONS_OF[self.kinds[facts_of]])
        if not relations:
            return f"{name} is a region."
        rng.shuffle(relations)
        clauses = [rng.choice(RELATIONS[r].clauses).format(self.facts[facts_of, r]) for r in relations]
        return f"{name} {', '.join(clauses)}."
