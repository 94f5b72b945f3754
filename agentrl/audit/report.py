"""Results of an audit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Fault(NamedTuple):
    """A violated rule in a rollout, without its place in a file."""

    words: str
    """What is wrong, with the value."""
    row: int | None = None
    """The row's number; None for the rollout as a whole."""
    token: int | None = None
    """Index of the first token with it; None for the row as a whole."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault with its place."""

    where: str
    """File and line (in parquet: the rollout's number from 1)."""
    rollout_id: str
    """Empty if the rollout cannot be read."""
    fault: Fault
    """What is wrong."""

    def __str__(self) -> str:
        """Return place and fault in one line."""
        fields = [
            self.where,
            f"rollout {self.rollout_id}" if self.rollout_id else "",
            f"row {self.fault.row}" if self.fault.row is not None else "",
            f"token {self.fault.token}" if self.fault.token is not None else "",
        ]
        return f"{', '.join(field for field in fields if field)}: {self.fault.words}"


@dataclass(frozen=True, slots=True)
class DriftedTurn:
    """A turn whose text has other ids when it is retokenized."""

    rollout_id: str
    request_id: str
    token: int
    """Index of the turn's first token that would differ."""
    text: str
    """Text of the tokens from there on."""
    sampled: tuple[int, ...]
    """Sampled ids from there on."""
    again: tuple[int, ...]
    """Ids of the retokenized text."""


EXAMPLES = 3
"""Drifted turns that are kept as examples."""


@dataclass(slots=True)
class Report:
    """Counts and violations of all checked rollouts."""

    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    """Over all rows; shared tokens count in each."""
    sampled: int = 0
    """Sampled tokens, shared ones once; only of rollouts without violations, like drift."""
    trained: int = 0
    """Tokens with mask 1."""
    forks: Counter[str] = field(default_factory=Counter)
    """Rows by fork reason."""
    turns: int = 0
    """Sampled turns whose text was retokenized."""
    drifted: int = 0
    """Those with other ids after retokenization."""
    examples: list[DriftedTurn] = field(default_factory=list)
    """The first drifted turns."""
    violations: list[Violation] = field(default_factory=list)
    """In the order of the files."""
