"""Scripted experts that solve questions by searching, with faults for a warm start."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from agentrl import Message

from .world import RELATIONS_OF, Question, World

FAULTS = ("early", "relation", "document", "format", "query", "walk", "detour")
"""Faults of an expert, at most one per episode.

early: answers before the last hop is looked up. relation: follows another relation at one hop. document: reads a wrong
document of those found. format: forgets the tags once, and stops early. query: searches for half a name once, and stops
early. walk: follows random relations for at most as many hops as the question has; questions of one hop are solved
without a fault. detour: the same, but questions of one hop are solved after looking up another relation first.
"""

_TITLE = re.compile(r"\(Title: \"([^\"]*)\"\)")


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn of a plan."""

    thought: str
    """The relation to resolve next, or ``answer``."""
    tag: str
    """``search``, ``answer``, or empty if the expert forgets it."""
    content: str
    """A query or an answer."""

    @property
    def text(self) -> str:
        """The turn as the policy writes it."""
        opened, closed = (f"<{self.tag}> ", f" </{self.tag}>") if self.tag else (" ", "")
        return f"<think> {self.thought} </think>{opened}{self.content}{closed}"


class Expert:
    """Follows a plan turn by turn. The plan is made at the start, since the world determines the documents' content."""

    def __init__(self, world: World, question: Question, fault: str | None, rng: np.random.Generator) -> None:
        """Plan an episode with the ``fault``, one of `FAULTS`, or without."""
        self._world = world
        self._question = question
        self._rng = rng
        self._misreads = fault == "document"
        self._plan = self._with_fault(fault)

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the next turn. A turn without a closing tag ends with the template's end token."""
        turn = self._plan.pop(0)
        if turn.tag == "answer" and self._misreads:
            titles = [title for title in _TITLE.findall(observation[-1].content) if title != self._question.path[-2]]
            if titles:
                turn = PlannedTurn(turn.thought, turn.tag, self._misread(self._choice(titles)))
        return turn.text

    def _with_fault(self, fault: str | None) -> list[PlannedTurn]:
        question, hops = self._question, len(self._question.relations)
        if fault == "early":
            return _plan(question.relations[: self._below(hops)], question.path)
        if fault == "relation":
            return _plan(*self._stray(self._below(hops)))
        if fault in ("walk", "detour") and hops > 1:
            return _plan(*self._walk(1 + self._below(hops)))
        # These faults stop early: with a right answer after them, a policy would be rewarded for the fault.
        planned_hops = self._below(hops) if fault in ("format", "query") else hops
        plan = _plan(question.relations[:planned_hops], question.path)
        if fault == "detour":
            plan.insert(
                0, PlannedTurn(self._choice(self._available_relations(question.path[0])), "search", question.path[0])
            )
        if fault == "format":
            at = self._below(len(plan))
            plan.insert(at, PlannedTurn(plan[at].thought, "", plan[at].content))
        elif fault == "query":
            at = self._below(planned_hops + 1)
            name, _, last_name = question.path[at].partition(" ")
            plan.insert(
                at, PlannedTurn(question.relations[at], "search", name if last_name else question.relations[at])
            )
        return plan

    def _stray(self, at: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Take another relation at hop ``at``, then continue with the question's as far as they apply."""
        taken, path = list(self._question.relations[:at]), list(self._question.path[: at + 1])
        wrong = [name for name in self._available_relations(path[-1]) if name != self._question.relations[at]]
        for relation in (self._choice(wrong), *self._question.relations[at + 1 :]):
            if relation not in self._available_relations(path[-1]):
                break
            taken.append(relation)
            path.append(self._world.facts[path[-1], relation])
        return tuple(taken), tuple(path)

    def _walk(self, hops: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        taken: list[str] = []
        path = [self._question.path[0]]
        while len(taken) < hops and (relations := self._available_relations(path[-1])):
            taken.append(self._choice(relations))
            path.append(self._world.facts[path[-1], taken[-1]])
        return tuple(taken), tuple(path)

    def _misread(self, title: str) -> str:
        """Return a fact of the document ``title``: that of the question's last relation, if it has one."""
        relations, last = self._available_relations(title), self._question.relations[-1]
        if not relations:
            return title
        return self._world.facts[title, last if last in relations else self._choice(relations)]

    def _available_relations(self, name: str) -> tuple[str, ...]:
        return RELATIONS_OF[self._world.kinds[name]]

    def _choice(self, items: tuple[str, ...] | list[str]) -> str:
        return items[self._below(len(items))]

    def _below(self, high: int) -> int:
        return int(self._rng.integers(high))


def _plan(relations: tuple[str, ...], path: tuple[str, ...]) -> list[PlannedTurn]:
    """Search for each name of the path, then answer with the name after the last relation."""
    searches = [PlannedTurn(relation, "search", name) for relation, name in zip(relations, path, strict=False)]
    return [*searches, PlannedTurn("answer", "answer", path[len(relations)])]
